"""What computes gradients: the seam, torch, and a twin in memory.

Imports `losses` and `rollouts`.
"""
