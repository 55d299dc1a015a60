"""What runs inside vLLM's processes: transfer of weights, and repairs for workers on a CPU.

Imports only `deploy.weights`, the format of published weights.
"""
