"""The model registry below the trainer and deploy: MLflow, its in-memory twin, and checkpoints.

Imports only `errors` and `process`.
"""
