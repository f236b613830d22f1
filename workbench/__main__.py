"""`python -m workbench COMMAND`: works with any Python >= 3.11, before anything is installed."""
import sys

if sys.version_info < (3, 11):  # noqa: UP036  (the reader of this message has an older one)
    sys.exit("The workbench needs Python 3.11 or newer; this is Python %d.%d (%s).\n"
             "Name a newer one, for example: make lab PYTHON=python3.12" % (*sys.version_info[:2], sys.executable))

if __name__ == "__main__":
    try:
        from workbench.cli import main

        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:           # Ctrl-C while packages are loaded, too
        sys.exit(130)
