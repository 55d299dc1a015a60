"""What every protocol implements and shares: the seam, checks of a body, the error envelope.

Imports `interaction` and `encoding`.
"""
