"""The bounded queue on disk that events wait in, and its way to Kafka.

Imports `interaction` and `observability`.
"""
