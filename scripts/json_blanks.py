"""How long runs of blanks get in JSON that a model writes at temperature 1: one request per seed, to a running router.

Prints, of all answers, how many ended by themselves, and how many have a run of blanks outside of strings of at least so many.
"""

import argparse
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RUNS = (2, 4, 8, 16, 32, 64, 128)


def runs(text: str) -> list[int]:
    """Lengths of the runs of blanks between two tokens of JSON, of an answer that may have been cut."""
    found, run, inside, escaped = [], 0, False, False
    for char in text:
        if not inside and char in " \n\r\t":
            run += 1
            continue
        found.append(run)
        run = 0
        if inside and escaped:
            escaped = False
        elif inside and char == "\\":
            escaped = True
        elif char == '"':
            inside = not inside
    return [length for length in [*found, run] if length > 0]


def ask(args: argparse.Namespace, schema: dict, seed: int) -> tuple[str, str]:
    body = {
        "model": args.model,
        "messages": [{"role": "user", "content": args.prompt}],
        "temperature": args.temperature,
        "seed": seed,
        "max_tokens": args.max_tokens,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    request = urllib.request.Request(
        f"{args.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        choice = json.load(answer)["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schema", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", default="Describe a book about the sea as JSON.")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    schema = json.loads(args.schema.read_text())
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: ask(args, schema, seed), range(args.seeds)))
    longest = [max(runs(text), default=0) for text, _ in answers]
    total = sum(len(text) for text, _ in answers)
    figures = {
        "answers": len(answers),
        "ended": sum(reason == "stop" for _, reason in answers),
        "longest": max(longest),
        "blanks_share": round(sum(sum(runs(text)) for text, _ in answers) / max(total, 1), 3),
        "with_run_of": {str(least): sum(run >= least for run in longest) for least in RUNS},
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
