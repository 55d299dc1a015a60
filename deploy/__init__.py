"""Decides which version serves: gates, promotion, rollback, and the published weights."""
