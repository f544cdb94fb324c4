"""Where a step's time goes on a GPU: the kernels of one kind of step, by name and in order, with the gaps between them.

    python3 scripts/trace_kernels.py --tokens 256 -- thalweg bench engine --device cuda --batch 256 ...

Steps are told apart by their number of tokens. Needs a C compiler and CUPTI, of a CUDA toolkit (--cuda) or of PyPI's packages
nvidia-cuda-cupti and nvidia-cuda-runtime. The device runs as without it; what is traced costs the host some 2 us a launch.
"""

import argparse
import collections
import os
import pathlib
import statistics
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
# A step's first kernel, with a block a token.
FIRST = "embed"
NAME_WIDTH = 56
# Kernels of the excerpt: more than a layer has.
EXCERPT = 12

Kernel = collections.namedtuple("Kernel", "start end size name")


def build(cuda, folder):
    """The library to inject."""
    roots = [cuda / "extras" / "CUPTI", cuda]
    header = next((root / "include" for root in roots if (root / "include" / "cupti.h").exists()), None)
    library = next((path for root in roots for path in root.glob("lib*/libcupti.so*")), None)
    if header is None or library is None:
        raise SystemExit(f"no cupti.h and libcupti.so under {cuda}: name a CUDA toolkit with --cuda")
    out = folder / "trace.so"
    command = ["cc", "-O1", "-shared", "-fPIC", f"-I{header}", f"-I{cuda / 'include'}", str(HERE / "trace_kernels.c")]
    subprocess.run([*command, "-o", str(out), str(library), f"-Wl,-rpath,{library.parent}"], check=True)
    return out


def steps_of(path, tokens):
    """Runs of kernels from each first one of so many tokens to the next first one, the early steps left out."""
    kernels = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            start, end, size, name = line.rstrip("\n").split(" ", 3)
            kernels.append(Kernel(int(start), int(end), int(size), name))
    steps, current = [], None
    for kernel in sorted(kernels):
        if kernel.name.startswith(FIRST):
            steps += [current] if current else []
            current = [kernel] if kernel.size == tokens else None
        elif current is not None:
            current.append(kernel)
    return steps[len(steps) // 3 :]


def report(steps, tokens):
    between = [later[0].start - step[0].start for step, later in zip(steps, steps[1:])]
    spans = [max(kernel.end for kernel in step) - step[0].start for step in steps]
    median = statistics.median(spans) / 1e6
    period = statistics.median(between) / 1e6 if between else float("nan")
    print(f"{len(steps)} steps of {tokens} tokens: {median:.3f} ms from first to last, {period:.3f} ms from one to the next")
    busy, gaps, counts = collections.Counter(), collections.Counter(), collections.Counter()
    for step in steps:
        end = step[0].start
        for kernel in step:
            key = f"{kernel.name[:NAME_WIDTH]} ({kernel.size})"
            busy[key] += kernel.end - kernel.start
            gaps[key] += kernel.start - end
            counts[key] += 1
            end = max(end, kernel.end)
    print("us a step, times, us each, us since all before had ended (less than 0: they overlap)")
    for key, total in busy.most_common():
        each, gap = total / counts[key] / 1e3, gaps[key] / counts[key] / 1e3
        print(f"{total / len(steps) / 1e3:9.1f} {counts[key] / len(steps):6.1f} {each:9.2f} {gap:8.2f}  {key}")
    step = steps[len(steps) // 2]
    middle = step[len(step) // 2 :][:EXCERPT]
    print("from the middle of a step: us since the first, us")
    for kernel in middle:
        print(f"{(kernel.start - middle[0].start) / 1e3:9.2f} {(kernel.end - kernel.start) / 1e3:9.2f}  {kernel.name[:NAME_WIDTH]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, required=True, help="tokens of the steps to tell of")
    parser.add_argument("--cuda", type=pathlib.Path, default=pathlib.Path("/usr/local/cuda"), help="folder of a CUDA toolkit")
    parser.add_argument("command", nargs="+", help="what to run, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "trace"
        library = build(options.cuda, pathlib.Path(folder))
        subprocess.run(options.command, check=True, env={**os.environ, "CUDA_INJECTION64_PATH": str(library), "TRACE_OUT": str(out)})
        if not out.exists():
            raise SystemExit("the command used no GPU")
        steps = steps_of(out, options.tokens)
        if not steps:
            raise SystemExit(f"no step of {options.tokens} tokens: a recorded step has those of its bucket")
        report(steps, options.tokens)


if __name__ == "__main__":
    main()
