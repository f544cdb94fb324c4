"""Renders every chat by every template with Python's jinja2, set up as the transformers library does, and writes
renders.json. Run by hand when a template or a chat changes: python3 reference.py"""

import json
import pathlib

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, in °C <now> & \"later\"",
        "parameters": {"type": "object", "properties": {"items": {"type": "array"}, "city": {"type": "string"}}},
    },
}


def call(arguments, identity="call00001"):
    return {"id": identity, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


USER = {"role": "user", "content": "What is 1 < 2 & 3 > 2?"}
CHATS = {
    "user": [USER],
    "system_user": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "  Grüße 👋  "}],
    "turns": [USER, {"role": "assistant", "content": "Yes.\n"}, {"role": "user", "content": "Why?"}],
    "system_only": [{"role": "system", "content": "Alone"}],
    "user_user": [USER, USER],
    "assistant_twice": [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    "assistant_first": [{"role": "assistant", "content": "a"}],
    "developer": [{"role": "developer", "content": "d"}, USER],
    "banana": [{"role": "banana", "content": "b"}],
    "empty": [{"role": "user", "content": ""}],
    "quote": [{"role": "user", "content": "> quoted <"}],
    "tools": [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [call({"city": "Zürich", "items": [1, 2.5, True, None]})]},
        {"role": "tool", "tool_call_id": "call00001", "content": '{"temp": 21}'},
        {"role": "assistant", "content": "<think>\nwarm\n</think>\n\n21 degrees."},
    ],
    "thinking": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}],
    "two_calls": [USER, {"role": "assistant", "content": "", "tool_calls": [call({}), call({"city": "B"}, "call00002")]}],
    "named": [{"role": "user", "content": "hi", "name": "ann", "weight": 1.5, "flag": False}],
}
KWARGS = {"user": {"enable_thinking": False, "date_string": "01 Jan 2025"}}


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.If(jinja2.nodes.Const(True), body, [], []).set_lineno(line)


def environment():
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    return made


def render(source, chat, tools, kwargs):
    try:
        text = environment().from_string(source).render(
            messages=chat, tools=tools, documents=None, add_generation_prompt=True, bos_token="<|endoftext|>",
            eos_token="<|im_end|>", **kwargs
        )
        return {"text": text}
    except jinja2.exceptions.UndefinedError:
        return {"error": None}
    except jinja2.exceptions.TemplateError as error:
        return {"error": str(error)}


def main():
    renders = []
    for path in sorted(HERE.glob("templates/*.jinja")):
        for name, chat in CHATS.items():
            tools = [WEATHER] if name in ("tools", "two_calls") else None
            kwargs = KWARGS.get(name, {})
            case = {"template": path.stem, "chat": name, "messages": chat, "tools": tools, "kwargs": kwargs}
            renders.append(case | render(path.read_text(), chat, tools, kwargs))
    (HERE / "renders.json").write_text(json.dumps(renders, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
