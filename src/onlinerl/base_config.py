"""The base of every configuration model. Imports nothing heavy; secrets never live here."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Unknown keys are errors, instances are immutable, docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
