# Thin names for `python -m workbench ...`, which works without make, on Windows too.
PYTHON ?= python3
ARGS ?=
COMMANDS := lab setup test size doctor lint types lessons bench lock clean

OLD := The workbench needs Python 3.11 or newer; name one, for example: make lab PYTHON=python3.12

.PHONY: help $(COMMANDS)
help: ; @$(PYTHON) -m workbench --help
$(COMMANDS):
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "$(OLD)"; exit 1; }
	@$(PYTHON) -m workbench $@ $(ARGS)
