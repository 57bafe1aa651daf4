"""python -m benchmarks TASK [options]: one experiment of the paper, one module of this folder, or all experiments.

`make benchmark TASK=queue`, `make benchmark TASK="queue --full"`, `make benchmark TASK=all`.
"""

from importlib import import_module
from pathlib import Path
import sys

from benchmarks.experiments import RUN

MODULES = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def main() -> None:
    """Run the first word of the command line with the others as its options."""
    task, *rest = sys.argv[1:] or ["foundation"]
    if task in RUN:
        module, arguments = "experiments", ["--tasks", task, *rest]
    elif task == "all":
        module, arguments = "experiments", rest
    elif task in MODULES:
        module, arguments = task, rest
    else:
        sys.exit(f"{task!r} is not known; use one of {[*RUN, 'all', *MODULES]}.")
    for name in (module, "sbibm") if task == "all" else (module,):
        sys.argv = [name, *arguments]
        import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
