# SPDX-License-Identifier: Apache-2.0
"""The gates on finished files: real wheels and an sdist pass, and each fault planted in one is seen by its gate."""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

for needed in ("auditwheel", "abi3audit", "twine", "elftools", "scikit_build_core"):
    pytest.importorskip(needed, reason="the pinned tools are not installed")
import check_isa_leaks  # noqa: E402
from gates.programs import program_problems  # noqa: E402
from gates.sdist import sdist_problems  # noqa: E402
from gates.wheel import wheel_problems  # noqa: E402

BIN = Path(sys.executable).parent
WITH_TOOLS = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
MODULE = "gdn_cpu/_C.abi3.so"
ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")

Contents = dict[str, bytes]


def read(path: Path) -> Contents:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def write(path: Path, contents: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in contents.items():
            wheel.writestr(name, content)
    return path


@pytest.fixture(scope="module")
def cpu_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed gdn-cpu as a wheel again, with the tag that it reaches."""
    try:
        installed = importlib.metadata.distribution("gdn-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gdn-cpu is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    made_by_pip = ("INSTALLER", "REQUESTED", "direct_url.json")
    files = [file for file in installed.files if file.name not in made_by_pip and file.suffix != ".pyc"]
    contents = {str(file): Path(file.locate()).read_bytes() for file in files}
    (record,) = (path for path in contents if path.endswith("/RECORD"))
    contents[record] = "".join(f"{path},,\n" for path in contents).encode()
    name = f"gdn_cpu-{installed.version}-cp310-abi3-linux_{platform.machine()}.whl"
    plain = write(folder / name, contents)
    repair = ["auditwheel", "repair", "--patcher", "none", "--wheel-dir", folder / "repaired", plain]
    subprocess.run(repair, env=WITH_TOOLS, check=True, capture_output=True)
    return next((folder / "repaired").iterdir())


@pytest.fixture(scope="module")
def small_wheel(cpu_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a module that does nothing: reading every instruction of the real one takes seconds."""
    folder = tmp_path_factory.mktemp("small")
    contents = read(cpu_wheel) | {MODULE: compiled(folder, ENTRY, "-fvisibility=hidden")}
    wheel = write(folder / cpu_wheel.name, contents)
    assert found(wheel) == ""
    return wheel


@pytest.fixture(scope="module")
def core_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    options = ["-qq", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, ROOT / "packages/gdn-core"], check=True)
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def cpu_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "--outdir",
        folder,
        ROOT / "packages/gdn-cpu",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.iterdir())


def compiled(folder: Path, source: str, *options: str) -> bytes:
    """Compile a module in place of the real one."""
    (folder / "planted.cpp").write_text(source)
    compiler = os.environ.get("CXX", "c++").split()
    command = [*compiler, "-O2", "-fPIC", "-shared", "planted.cpp", "-o", "planted.so", *options]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "planted.so").read_bytes()


def found(path: Path, gate: Callable[..., object] = wheel_problems, **options: bool) -> str:
    if gate is wheel_problems:
        options.setdefault("is_release", False)
    return "\n".join(gate(path, **options))


def test_wheels_and_an_sdist_without_faults_pass_every_gate(cpu_wheel: Path, core_wheel: Path, cpu_sdist: Path):
    for wheel in (cpu_wheel, core_wheel):
        assert found(wheel) == ""
        assert found(wheel, program_problems) == ""
    assert found(cpu_sdist, sdist_problems) == ""
    assert found(cpu_sdist, program_problems) == ""


ENTRY = 'extern "C" __attribute__((visibility("default"))) void* PyInit__C() { return nullptr; }\n'
LOOP = "void clear(int* x) {\n#pragma omp parallel for\nfor (int i = 0; i < 8; ++i) x[i] = 0; }"
# GCC's vectors, so that no intrinsic's header is needed.
ADD = "typedef float V __attribute__((vector_size(64)));\nvoid add(V* x, const V* y) { *x += *y; }"


@pytest.mark.report("E01", "E07", "D08")
@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        (LOOP, ["-fopenmp"], "needs libgomp.so.1. Do not link it"),
        ("void other();\nvoid f() { other(); }", ["-Wl,-rpath,/opt/lib"], "search path of its own (RPATH)"),
        ('__attribute__((visibility("default"))) int extra = 1;', [], "exports extra"),
        (
            'extern "C" int omp_get_num_threads();\nint f() { return omp_get_num_threads(); }',
            [],
            "expects omp_get_num_t",
        ),
        ("", ["-s"], "is stripped"),
    ],
    ids=["libgomp", "rpath", "export", "foreign", "stripped"],
)
def test_a_module_that_links_what_it_must_not(small_wheel: Path, tmp_path: Path, source, options, problem):
    contents = read(small_wheel)
    contents[MODULE] = compiled(tmp_path, ENTRY + source, "-fvisibility=hidden", *options)
    assert problem in found(write(tmp_path / small_wheel.name, contents))


@ON_X86
@pytest.mark.parametrize(
    ("namespace", "problem"),
    [
        ("gdn::cpu::baseline", "is of the level baseline and needs x86_v4"),
        ("gdn::cpu::x86_v3", "is of the level x86_v3 and needs x86_v4"),
        # A function that no level owns, of which the linker kept an AVX-512 copy.
        ("std_like", "is of the level baseline and needs x86_v4"),
        ("gdn::cpu::x86_v4", None),
    ],
)
def test_AVX_512_below_its_level_in_a_wheel(small_wheel: Path, tmp_path: Path, namespace, problem):
    contents = read(small_wheel)
    source = f"{ENTRY}namespace {namespace} {{ {ADD.replace(chr(10), ' ')} }}"
    contents[MODULE] = compiled(tmp_path, source, "-fvisibility=hidden", "-mavx512f", "-nostartfiles")
    seen = found(write(tmp_path / small_wheel.name, contents))
    assert seen == "" if problem is None else problem in seen


@ON_X86
def test_AVX_512_in_an_object_of_the_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "CMakeFiles" / "gdn_cpu_kernels_baseline.dir"
    folder.mkdir(parents=True)
    compiled(tmp_path, f"namespace gdn::cpu::baseline {{ {ADD.replace(chr(10), ' ')} }}", "-mavx512f", "-c")
    (tmp_path / "planted.so").rename(folder / "planted.o")
    assert check_isa_leaks.check_objects(tmp_path) == 1
    assert "needs x86_v4" in capsys.readouterr().err


def without(name: str) -> Callable[[Contents], Contents]:
    return lambda contents: {path: data for path, data in contents.items() if not path.endswith(name)}


def replaced(file: str, old: str, new: str) -> Callable[[Contents], Contents]:
    def change(contents: Contents) -> Contents:
        (path,) = (path for path in contents if path.endswith(file))
        assert old.encode() in contents[path]
        return contents | {path: contents[path].replace(old.encode(), new.encode())}

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("/licenses/LICENSE"), "licence: expected the repository's LICENSE"),
        (replaced("/licenses/LICENSE", "Apache", "Another"), "licence: expected the repository's LICENSE"),
        (lambda contents: contents | {"gdn_cpu/table.bin": os.urandom(9 << 20)}, "size: expected at most 8 MiB"),
        (lambda contents: contents | {"tests/test_it.py": b""}, "installs outside of gdn_cpu: tests"),
        (lambda contents: contents | {"gdn_cpu.libs/libgomp.so.1": b""}, "installs outside of gdn_cpu: gdn_cpu.libs"),
        (without("/py.typed"), "no gdn_cpu/py.typed"),
        (without(".so"), "shared objects: expected ['gdn_cpu/_C.abi3.so'], got []"),
        (without("/entry_points.txt"), "entry points: expected"),
        (replaced("/METADATA", "nanobind-backend>=1.0", "nanobind-backend==1.0"), "unexpected requirement nanobind-b"),
        (
            replaced("/METADATA", "Requires-Python: >=3.10", "Requires-Python: >=3.11"),
            "expected Requires-Python: >=3.10",
        ),
        (replaced("/WHEEL", "cp310-abi3", "cp311-cp311"), "in the file WHEEL"),
        (lambda contents: contents | {MODULE: b"not an ELF file"}, "is not a shared object"),
    ],
)
def test_a_wheel_with_wrong_contents(small_wheel: Path, tmp_path: Path, change, problem):
    assert problem in found(write(tmp_path / small_wheel.name, change(read(small_wheel))))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("pin", ["gdn-{}==0.0.1;", "gdn-{}>={version};", "gdn-{}~={version};"])
def test_extras_that_do_not_pin_the_same_version(core_wheel: Path, tmp_path: Path, backend, pin):
    version = core_wheel.name.split("-")[1]
    wrong = pin.format(backend, version=version)
    change = replaced("/METADATA", f"gdn-{backend}=={version};", wrong)
    seen = found(write(tmp_path / core_wheel.name, change(read(core_wheel))))
    assert f"lacks the requirement gdn-{backend}=={version}" in seen
    assert f"unexpected requirement {wrong.rstrip(';')}" in seen


@pytest.mark.report("E06")
def test_a_tag_that_promises_too_much(cpu_wheel: Path, tmp_path: Path):
    """Its symbols are newer than what glibc 2.5, or 2.17 on Arm, has."""
    oldest = {"x86_64": "manylinux_2_5", "aarch64": "manylinux_2_17"}[platform.machine()]
    name = cpu_wheel.name.replace(cpu_wheel.stem.split("-")[-1], f"{oldest}_{platform.machine()}")
    path = write(tmp_path / name, read(cpu_wheel))
    assert f"which {oldest}_{platform.machine()} does not have" in found(path)
    assert f"the tag says {oldest}_{platform.machine()}" in found(path, program_problems)


def test_tags_that_a_release_must_not_have(small_wheel: Path, tmp_path: Path):
    contents = read(small_wheel)
    platform_tag = small_wheel.stem.split("-")[-1]
    plain = write(tmp_path / small_wheel.name.replace(platform_tag, f"linux_{platform.machine()}"), contents)
    assert "For a plain linux tag: auditwheel repair" in found(plain)
    newer = write(tmp_path / small_wheel.name.replace(platform_tag, f"manylinux_2_39_{platform.machine()}"), contents)
    assert "a release is for manylinux_2_28" in found(newer, is_release=True)
    assert "a release is for" not in found(newer)


def test_a_module_for_another_processor(small_wheel: Path, tmp_path: Path):
    name = small_wheel.name.replace("x86_64", "other").replace("aarch64", "x86_64").replace("other", "aarch64")
    assert "and the tag says" in found(write(tmp_path / name, read(small_wheel)))


@pytest.mark.report("E01")
def test_a_symbol_outside_of_the_stable_ABI(small_wheel: Path, tmp_path: Path):
    contents = read(small_wheel)
    source = 'extern "C" void* PyUnicode_New(long, unsigned);\nvoid* f() { return PyUnicode_New(1, 127); }'
    contents[MODULE] = compiled(tmp_path, ENTRY + source, "-fvisibility=hidden")
    assert "abi3audit failed" in found(write(tmp_path / small_wheel.name, contents), program_problems)


def test_a_description_that_no_index_renders(core_wheel: Path, tmp_path: Path):
    contents = replaced("/METADATA", "text/markdown", "text/x-rst")(read(core_wheel))
    (metadata,) = (path for path in contents if path.endswith("/METADATA"))
    contents[metadata] += b"\n.. no-such-directive::\n"
    assert "twine failed" in found(write(tmp_path / core_wheel.name, contents), program_problems)


@pytest.mark.parametrize(
    ("left_out", "problem"),
    [
        ("/cmake/GdnIsa.cmake", "lacks cmake/GdnIsa.cmake"),
        ("/cmake/exports.map", "lacks cmake/exports.map"),
        ("/cmake/abi/tensor_view.h", "lacks tensor_view.h, which"),
        ("/csrc/kernels/simd/transpose.h", "lacks ../simd/transpose.h, which"),
        ("/LICENSE", "licence: expected the repository's LICENSE"),
        ("/VERSION", "lacks VERSION"),
    ],
)
def test_an_sdist_that_lacks_something(cpu_sdist: Path, tmp_path: Path, left_out, problem):
    path = changed_sdist(cpu_sdist, tmp_path, lambda member: None if member.name.endswith(left_out) else member)
    assert problem in found(path, sdist_problems)


def test_an_sdist_with_links_and_build_products(cpu_sdist: Path, tmp_path: Path):
    def change(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if member.name.endswith("/LICENSE"):
            member.type, member.linkname, member.size = tarfile.SYMTYPE, "../../LICENSE", 0
        if member.name.endswith("/README.md"):
            member.name = member.name.replace("README.md", "build/kernel.so")
        return member

    seen = found(changed_sdist(cpu_sdist, tmp_path, change), sdist_problems)
    assert "LICENSE is a link" in seen
    assert "contains the build product build/kernel.so" in seen


def changed_sdist(sdist: Path, folder: Path, change: Callable[[tarfile.TarInfo], tarfile.TarInfo | None]) -> Path:
    with tarfile.open(sdist) as old, tarfile.open(folder / sdist.name, "w:gz") as new:
        for member in old.getmembers():
            content = old.extractfile(member)
            kept = change(member)
            if kept is not None:
                new.addfile(kept, io.BytesIO(content.read()) if content else None)
    return folder / sdist.name
