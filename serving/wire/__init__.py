"""The seam that every protocol implements, and the checks and envelopes that protocols share.

Imports `interaction` and `encoding`.
"""
