"""The locks hold what pyproject.toml asks for, with hashes, for every platform, and name no index."""
import re
import tomllib

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from workbench import paths

ROOT = paths.checkout()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = {"main": [], "test": ["test"], "dev": ["test", "dev"]}
MACHINES = [("linux", "x86_64", "posix", "Linux"), ("linux", "aarch64", "posix", "Linux"),
            ("darwin", "arm64", "posix", "Darwin"), ("darwin", "x86_64", "posix", "Darwin"),
            ("win32", "AMD64", "nt", "Windows")]
PLATFORMS = [{"sys_platform": s, "platform_machine": m, "os_name": o, "platform_system": p, "python_version": v,
              "python_full_version": f"{v}.1", "implementation_name": "cpython",
              "platform_python_implementation": "CPython"}
             for s, m, o, p in MACHINES for v in ("3.11", "3.12", "3.13", "3.14")]


def text(lock):
    return (ROOT / "locks" / f"{lock}.txt").read_text("utf-8")


def pins(lock):
    """[(name, version, marker or None, number of hashes)]"""
    out = []
    for block in re.split(r"\n(?=[A-Za-z0-9])", text(lock)):
        if m := re.match(r"([A-Za-z0-9._-]+)==(\S+)(?: ; (.*?))? \\\n", block):
            out.append((canonicalize_name(m[1]), Version(m[2]), m[3] and Marker(m[3]), block.count("--hash=sha256:")))
    return out


def on(platform, lock):
    return {name: version for name, version, marker, _ in pins(lock) if marker is None or marker.evaluate(platform)}


@pytest.mark.parametrize("lock", EXTRAS)
def test_every_pin_has_hashes_and_no_index_is_named(lock):
    found = pins(lock)
    assert len(found) > 90 and all(hashes for *_, hashes in found)
    assert len(found) == len(re.findall(r"^[A-Za-z0-9].*==", text(lock), re.M))
    assert "://" not in text(lock) and not re.search(r"^ *--(index|extra|find|trusted)", text(lock), re.M)


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda p: f"{p['sys_platform']}-{p['platform_machine']}-{p['python_version']}")
@pytest.mark.parametrize("lock", EXTRAS)
def test_lock_satisfies_pyproject(lock, platform):
    asked = [*PROJECT["dependencies"], *(r for extra in EXTRAS[lock] for r in PROJECT["optional-dependencies"][extra])]
    have = on(platform, lock)
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if requirement.marker is None or requirement.marker.evaluate(platform):
            assert name in have, f"{name} is not in locks/{lock}.txt: python -m workbench lock"
            assert requirement.specifier.contains(have[name], prereleases=True), f"{name} {have[name]}: {requirement}"
        else:
            assert name not in have


@pytest.mark.parametrize("platform", PLATFORMS[::4], ids=lambda p: p["sys_platform"] + "-" + p["platform_machine"])
def test_the_larger_lock_holds_the_smaller_at_the_same_versions(platform):
    main, test, dev = (on(platform, lock) for lock in ("main", "test", "dev"))
    assert main.items() <= test.items() <= dev.items()


def test_no_name_is_pinned_twice_for_one_machine():
    for platform in PLATFORMS:
        names = [n for n, _, marker, _ in pins("dev") if marker is None or marker.evaluate(platform)]
        assert len(names) == len(set(names))


def test_heavy_extras_stay_outside():
    assert not {"torch", "llama-cpp-python", "ggml-python"} & {name for name, *_ in pins("dev")}
    assert not {"playwright", "mypy", "uv"} & {name for name, *_ in pins("test")}
