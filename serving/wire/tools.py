"""Tools of a body, whatever the protocol writes around them."""

from collections.abc import Sequence
from typing import Annotated, Protocol

from pydantic import Field

from onlinerl.serving.interaction.request import Tool
from onlinerl.serving.wire.parameters import wrong

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class ReadTool(Protocol):
    """Reads one tool of a protocol."""

    def __call__(self, value: object, *, at: str) -> Tool:
        """The tool `value`, which stands in the body at `at`.

        Raises:
            RequestRefused: it is no function that a model of this gateway may call.
        """


def read_tools(
    values: Sequence[object], read_tool: ReadTool, *, name_at: str = "name"
) -> tuple[Tool, ...]:
    """The functions that the model may call.

    Args:
        values: `tools` of the body, parsed JSON.
        read_tool: reads one of them.
        name_at: where the name stands within a tool, for error messages.

    Raises:
        RequestRefused: a tool cannot be read, or two tools have the same name.
    """
    tools = tuple(read_tool(value, at=f"tools.{number}") for number, value in enumerate(values))
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise wrong(f"tools.{number}.{name_at}", f"two tools are called {name!r}")
    return tools
