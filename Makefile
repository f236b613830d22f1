# Thin names for `python -m workbench ...`, which works without make, on Windows too.
PYTHON ?= python3
ARGS ?=
COMMANDS := lab setup test size doctor lint types bench lock clean

.PHONY: help $(COMMANDS)
help: ; @$(PYTHON) -m workbench --help
$(COMMANDS): ; @$(PYTHON) -m workbench $@ $(ARGS)
