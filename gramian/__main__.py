"""`python -m gramian` runs the command line of the package; it also works under torchrun."""

from gramian.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
