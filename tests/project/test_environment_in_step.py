"""environment.yml (conda) and pyproject.toml ask for the same things; checked without conda."""
import re
import tomllib

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from workbench import paths

ROOT = paths.checkout()
CONDA_NAME = {"graphviz": "python-graphviz", "matplotlib": "matplotlib-base"}      # PyPI -> conda-forge
CONDA_ONLY = {"python", "pip", "graphviz"}          # conda-forge's "graphviz" is the dot program
PIP_ONLY = {"gguf", "graphviz-pure", "cupy-cuda12x"}    # not on conda-forge, or with a marker that conda cannot say
EXTRAS = ("test",)


def asked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *(r for extra in EXTRAS for r in project["optional-dependencies"][extra])]
    return project["requires-python"], [Requirement(line) for line in lines]


def offered():
    doc = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    conda, pip = {}, []
    for entry in doc["dependencies"]:
        if isinstance(entry, dict):
            pip += entry["pip"]
            continue
        name, spec = re.fullmatch(r"([A-Za-z0-9._-]+)\s*(.*)", entry).groups()
        assert not re.match(r"=[^=]", spec), f"{entry}: write ==1.2 or >=1.2, not conda's fuzzy ="
        conda[name] = SpecifierSet(spec.replace(" ", ""))
    return conda, [Requirement(line) for line in pip]


def test_conda_lines_match():
    python, requirements = asked()
    conda, _ = offered()
    want = {CONDA_NAME.get(canonicalize_name(r.name), canonicalize_name(r.name)): r.specifier
            for r in requirements if canonicalize_name(r.name) not in PIP_ONLY}
    assert {name: spec for name, spec in conda.items() if name not in CONDA_ONLY} == want
    assert conda["python"] == SpecifierSet(python)


def test_pip_lines_match_with_their_markers():
    _, requirements = asked()
    _, pip = offered()

    def key(requirements):
        return {canonicalize_name(r.name): (r.specifier, str(r.marker)) for r in requirements}
    assert key(pip) == key([r for r in requirements if canonicalize_name(r.name) in PIP_ONLY])


def test_a_marker_needs_a_pip_line():
    _, requirements = asked()
    assert {canonicalize_name(r.name) for r in requirements if r.marker} <= PIP_ONLY
