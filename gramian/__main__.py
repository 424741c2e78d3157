"""`python -m gramian`: the command line, also under torchrun."""

from gramian.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
