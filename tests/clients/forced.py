"""Schemas that leave a model one answer, so that tests do not hang on its wit."""

import json
from typing import Literal

import pydantic

QUESTION = [{"role": "user", "content": "Tell me of the river."}]


class River(pydantic.BaseModel):
    """A river."""

    name: Literal["Rhine"]
    length_km: Literal[1233]
    tags: list[Literal["navigable"]] = pydantic.Field(min_length=2, max_length=2)


RHINE = {"name": "Rhine", "length_km": 1233, "tags": ["navigable", "navigable"]}


def one_of(value):
    """A response format whose only text is a value's."""
    schema = {"name": "answer", "strict": True, "schema": {"const": value}}
    return {"type": "json_schema", "json_schema": schema}


def tool(name, **values):
    """A function whose arguments can only be these; a list is of what it may choose from."""
    parameters = {
        "type": "object",
        "properties": {key: {"enum": value if isinstance(value, list) else [value]} for key, value in values.items()},
        "required": list(values),
        "additionalProperties": False,
    }
    function = {"name": name, "description": f"{name} it", "strict": True, "parameters": parameters}
    return {"type": "function", "function": function}


def named(name):
    """The tool_choice that forces a function."""
    return {"type": "function", "function": {"name": name}}


def arguments(call):
    """Of a call of the openai SDK."""
    return json.loads(call.function.arguments)
