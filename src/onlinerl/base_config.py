"""The base class of every configuration model.

Configuration holds no secrets; those are environment variables, see `secret_names`.
"""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Refuses unknown keys, is immutable, and takes field descriptions from docstrings.

    The docstring of a field is its entry in docs/configuration.md: say what it is, with its unit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
