"""What only a checkout can do: set up, test, count, check, lock.

`python -m workbench COMMAND` calls it; no wheel holds it.
"""
