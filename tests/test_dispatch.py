# SPDX-License-Identifier: Apache-2.0
"""Which backend runs a call, what a person is told about it, and what importing gdn_core costs."""

import asyncio
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import platform
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import gdn_core
from contract_calls import small_call
from gdn_core import _dispatch, _log, _registry, _schema, _validate, triton_backend
from gdn_core.testing import inputs, oracle

FUSED_DECODE = "fused_gdn_decode_post_conv_mtp"
VERSION = gdn_core.__version__
HAS_CPU = any(info.name == "cpu" and info.available for info in gdn_core.backends())
needs_cpu = pytest.mark.usefixtures("cpu_backend")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("GDN_BACKEND", "GDN_DECODE_KERNEL", "GDN_SKIP_VERSION_CHECK", "GDN_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rediscover(monkeypatch):
    """Let the next use of a backend look for backends again, and forget what it found afterwards."""

    def forget():
        monkeypatch.setattr(_registry, "_backends", None)
        monkeypatch.setattr(_dispatch, "_fast", {})
        monkeypatch.setattr(_dispatch, "_default", None)
        _dispatch._forced_here.set(None)
        _registry.settings.cache_clear()

    yield forget
    monkeypatch.undo()
    _registry.settings.cache_clear()


def norm_call(**changes):
    return {**inputs.norm_arguments((2, 8)), **changes}


def rows():
    return {info.name: info for info in gdn_core.backends()}


def run_python(code, *, path=(), **env):
    """Run `code` in a new interpreter and return what it printed as JSON."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GDN_")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), **env}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def distribution(directory: Path, name: str, version: str, entry_points: dict[str, str]) -> Path:
    """Write the metadata of an installed distribution, which hides a real one of the same name."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[gdn_core.backends]", *lines, ""]) if lines else "")
    return directory


SHOW_BACKENDS = """
    import json, sys
    import gdn_core
    rows = {b.name: [b.version, b.available, b.level, b.reason, b.install] for b in gdn_core.backends()}
    print(json.dumps({"rows": rows, "loaded": "gdn_cpu" in sys.modules}))
"""


# --- the list of backends ---------------------------------------------------------------------------------------------


def test_backends_names_each_backend_and_what_it_lacks():
    infos = gdn_core.backends()
    assert [info.name for info in infos][:3] == ["cpu", "cuda", "triton"]
    assert infos[-1].name == "reference"
    for info in infos:
        assert info.available == (info.reason is None), info
        missing = info.version is None and not info.available
        assert info.install == (f'pip install "gdn-core[{info.name}]=={VERSION}"' if missing else None)
    assert rows()["reference"].available
    assert rows()["reference"].version == VERSION


@needs_cpu
def test_the_cpu_row_follows_the_level_in_use():
    gdn_cpu = pytest.importorskip("gdn_cpu")
    assert rows()["cpu"].version == VERSION
    for level in gdn_cpu.levels():
        if level.supported:
            with gdn_cpu.isa_level(level.name):
                assert rows()["cpu"].level == level.name


@needs_cpu
def test_GDN_CPU_ISA_rejects_other_names():
    _, available, _, reason, install = run_python(SHOW_BACKENDS, GDN_CPU_ISA="avx9000")["rows"]["cpu"]
    assert not available
    assert install is None, "pip does not help against a wrong variable"
    assert "GDN_CPU_ISA" in reason and "baseline" in reason and "avx9000" in reason


@needs_cpu
@pytest.mark.parametrize("kept", [10, 64, 5_000, 0.5, 0.999])
def test_a_backend_whose_module_lacks_its_end_is_not_loaded(tmp_path, kept):
    """A full disk, or a download that broke off: past its header, the loader would crash on such a file."""
    module = Path(importlib.util.find_spec("gdn_cpu._C").origin)
    content = module.read_bytes()
    copy = tmp_path / "gdn_cpu" / module.name
    copy.parent.mkdir()
    copy.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    (copy.parent / "__init__.py").write_text("from . import _C\n")
    distribution(tmp_path, "gdn-cpu", VERSION, {"cpu": "gdn_cpu:provider"})
    (info,) = tmp_path.glob("*.dist-info")
    (info / "RECORD").write_text(f"gdn_cpu/__init__.py,,\ngdn_cpu/{module.name},,\n")
    found = run_python(SHOW_BACKENDS, path=[tmp_path])
    _, available, _, reason, install = found["rows"]["cpu"]
    assert not available
    assert str(copy) in reason
    assert ("is cut short" in reason) == (kept != 10)
    assert install == f'pip install --force-reinstall --no-deps "gdn-cpu=={VERSION}"'


def test_a_backend_that_does_not_import_is_listed_with_its_error(tmp_path):
    (tmp_path / "broken_backend.py").write_text("import a_module_that_does_not_exist\n")
    (tmp_path / "empty_backend.py").write_text("")
    (tmp_path / "failing_backend.py").write_text(
        "class Provider:\n    def availability(self): raise OSError('the driver is gone')\nprovider = Provider()\n"
    )
    entries = {
        "broken": "broken_backend:provider",
        "empty": "empty_backend:provider",
        "failing": "failing_backend:provider",
    }
    distribution(tmp_path, "somebodys-backends", "3.1", entries)
    distribution(tmp_path, "gdn-cpu", VERSION, {"cpu": "broken_backend:provider"})
    found = run_python(SHOW_BACKENDS, path=[tmp_path])["rows"]
    for name, words in {
        "broken": "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'",
        "cpu": "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'",
        "empty": "AttributeError",
        "failing": "OSError: the driver is gone",
    }.items():
        version, available, _, reason, install = found[name]
        assert not available
        assert words in reason
        remedy = f'pip install --force-reinstall --no-deps "gdn-cpu=={VERSION}"'
        assert install == (remedy if name == "cpu" else None)
        assert version == (VERSION if name == "cpu" else "3.1")
    assert found["reference"][1]


def test_a_backend_of_another_version_is_unavailable_and_not_even_imported(tmp_path):
    distribution(tmp_path, "gdn-cpu", "0.0.7", {"cpu": "gdn_cpu:provider"})
    found = run_python(SHOW_BACKENDS, path=[tmp_path])
    version, available, _, reason, install = found["rows"]["cpu"]
    assert (version, available) == ("0.0.7", False)
    assert "0.0.7" in reason and VERSION in reason
    assert install == f'pip install "gdn-core[cpu]=={VERSION}"'
    assert not found["loaded"]


@needs_cpu
def test_GDN_SKIP_VERSION_CHECK_accepts_another_version(tmp_path):
    distribution(tmp_path, "gdn-cpu", "0.0.7", {"cpu": "gdn_cpu:provider"})
    assert run_python(SHOW_BACKENDS, path=[tmp_path], GDN_SKIP_VERSION_CHECK="1")["rows"]["cpu"][1]


def test_an_installed_backend_that_cannot_run_here_is_not_to_be_installed_again(tmp_path):
    provider = "class Provider:\n    def availability(self): return 'no driver'\nprovider = Provider()\n"
    (tmp_path / "driverless.py").write_text(provider)
    distribution(tmp_path, "gdn-cuda", VERSION, {"cuda": "driverless:provider"})
    found = run_python(SHOW_BACKENDS, path=[tmp_path])["rows"]["cuda"]
    assert found == [VERSION, False, None, "no driver", None]


def test_wrong_settings_do_not_hide_the_backends(tmp_path):
    distribution(tmp_path, "gdn-cpu", "0.0.7", {"cpu": "gdn_cpu:provider"})
    found = run_python(SHOW_BACKENDS, path=[tmp_path], GDN_DECODE_KERNEL="fast", GDN_BACKEND="fast")
    assert "0.0.7" in found["rows"]["cpu"][3]


def test_without_gdn_cpu_the_reference_runs_and_says_once_what_to_install(tmp_path):
    distribution(tmp_path, "gdn-cpu", VERSION, {})
    code = """
        import json, logging, sys
        sys.modules["gdn_cpu"] = None
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append([record.levelname, record.getMessage()])
        logging.getLogger("gdn_core").addHandler(handler)
        logging.getLogger("gdn_core").setLevel(logging.INFO)
        import gdn_core, torch
        x = torch.ones(2, 8)
        for _ in range(3):
            gdn_core.rms_norm_gated(x, x, x[0], 1e-6)
            gdn_core.fused_gdn_gating(x[0], x, x, x[0])
        cpu = next(b for b in gdn_core.backends() if b.name == "cpu")
        print(json.dumps({"messages": messages, "cpu": [cpu.available, cpu.reason, cpu.install]}))
    """
    found = run_python(code, path=[tmp_path])
    command = f'pip install "gdn-core[cpu]=={VERSION}"'
    assert found["cpu"] == [False, "gdn-cpu is not installed", command]
    warnings = [text for level, text in found["messages"] if level == "WARNING"]
    assert len(warnings) == 1
    assert "reference" in warnings[0] and "gdn-cpu is not installed" in warnings[0] and command in warnings[0]


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "riscv64")])
def test_where_there_are_no_wheels_the_reason_says_where_there_are(monkeypatch, rediscover, system, machine):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    rediscover()
    for name in ("cpu", "cuda"):
        info = rows()[name]
        assert not info.available
        assert info.reason == f"gdn-{name} has wheels for Linux on x86_64 and aarch64, this is {system} {machine}"
        assert info.install is None, "no command brings a wheel that does not exist"
    call = norm_call()
    torch.testing.assert_close(gdn_core.rms_norm_gated(**call).double(), oracle.rms_norm_gated(**call))


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_extras_bring_a_backend_only_where_it_has_wheels(name):
    requirements = pytest.importorskip("packaging.requirements")
    wanted = [requirements.Requirement(text) for text in importlib.metadata.requires("gdn-core") or ()]
    backend = next(item for item in wanted if item.name == f"gdn-{name}")
    assert str(backend.specifier) == f"=={VERSION}"

    def applies(system, machine):
        return backend.marker.evaluate({"platform_system": system, "platform_machine": machine, "extra": name})

    assert applies("Linux", "x86_64") and applies("Linux", "aarch64")
    assert not applies("Darwin", "arm64") and not applies("Windows", "AMD64") and not applies("Linux", "riscv64")
    assert not backend.marker.evaluate({"platform_system": "Linux", "platform_machine": "x86_64", "extra": ""})


ACME = """
    import torch

    class Provider:
        name, version, device_types = "acme", "1.2", ("cpu",)
        level_in_use, why_not = "turbo", None

        def __init__(self):
            self.ops = {"rms_norm_gated": self.norm}

        def norm(self, x, gate, weight, eps, activation, out, dry_run=False):
            if activation == "sigmoid":
                raise NotImplementedError("activation: acme knows silu only")
            if not dry_run:
                out.fill_(7)

        def availability(self): return self.why_not
        def level(self): return self.level_in_use
        def details(self): return {"made by": "acme"}

    provider = Provider()
"""


def test_a_third_party_backend_is_found_listed_and_used(tmp_path):
    (tmp_path / "acme_gdn.py").write_text(textwrap.dedent(ACME))
    distribution(tmp_path, "acme-gdn", "1.2", {"acme": "acme_gdn:provider"})
    distribution(tmp_path, "gdn-cpu", VERSION, {})
    code = """
        import json, gdn_core, torch
        x = torch.ones(2, 8)
        acme = next(b for b in gdn_core.backends() if b.name == "acme")
        with gdn_core.record_calls() as calls:
            values = [gdn_core.rms_norm_gated(x, x, x[0], 1e-6)[0, 0].item()]
            values.append(gdn_core.rms_norm_gated(x, x, x[0], 1e-6, activation="sigmoid")[0, 0].item())
            gdn_core.fused_gdn_gating(x[0], x, x, x[0])
        errors = []
        with gdn_core.use_backend("acme"):
            values.append(gdn_core.rms_norm_gated(x, x, x[0], 1e-6)[0, 0].item())
            for call in (
                lambda: gdn_core.rms_norm_gated(x, x, x[0], 1e-6, activation="sigmoid"),
                lambda: gdn_core.fused_gdn_gating(x[0], x, x, x[0]),
            ):
                try:
                    call()
                except NotImplementedError as error:
                    errors.append(str(error))
        print(json.dumps({
            "row": [acme.version, acme.available, acme.level, acme.details],
            "values": values,
            "calls": sorted([op, name, count] for (op, name), count in calls.items()),
            "errors": errors,
        }))
    """
    found = run_python(code, path=[tmp_path])
    assert found["row"] == ["1.2", True, "turbo", {"made by": "acme"}]
    assert found["values"][0] == found["values"][2] == 7
    assert found["values"][1] == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=1e-5)
    assert found["calls"] == [
        ["fused_gdn_gating", "reference", 1],
        ["rms_norm_gated", "acme", 1],
        ["rms_norm_gated", "reference", 1],
    ]
    assert "acme knows silu only" in found["errors"][0]
    assert "has no kernel for fused_gdn_gating" in found["errors"][1]


# --- choosing ---------------------------------------------------------------------------------------------------------


def chosen():
    return gdn_core.explain("rms_norm_gated", **norm_call()).backend


AUTOMATIC = "cpu" if HAS_CPU else "reference"


def test_use_backend_as_a_plain_call_holds_until_none():
    assert chosen() == AUTOMATIC
    gdn_core.use_backend("reference")
    assert chosen() == "reference"
    gdn_core.use_backend(None)
    assert chosen() == AUTOMATIC


def test_use_backend_as_a_context_manager_nests_and_survives_exceptions():
    with gdn_core.use_backend("reference"):
        assert chosen() == "reference"
        with gdn_core.use_backend(AUTOMATIC):
            assert chosen() == AUTOMATIC
            with gdn_core.use_backend("reference"):
                assert chosen() == "reference"
            assert chosen() == AUTOMATIC
        assert chosen() == "reference"
        with gdn_core.use_backend(None):
            assert chosen() == AUTOMATIC
        assert chosen() == "reference"
    with pytest.raises(ZeroDivisionError), gdn_core.use_backend("reference"):
        _ = 1 // 0
    assert chosen() == AUTOMATIC


def test_a_block_leaves_the_plain_choice_as_it_was():
    gdn_core.use_backend("reference")
    with gdn_core.use_backend(AUTOMATIC):
        assert chosen() == AUTOMATIC
    assert chosen() == "reference"


@needs_cpu
def test_none_in_a_block_is_the_default():
    gdn_core.use_backend("reference")
    with gdn_core.use_backend(None):
        assert chosen() == "cpu"
    assert chosen() == "reference"


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@needs_cpu
def test_a_block_holds_for_its_thread_and_a_plain_call_for_all():
    with gdn_core.use_backend("reference"):
        assert in_thread(chosen) == "cpu"
    gdn_core.use_backend("reference")
    assert in_thread(chosen) == "reference"


@needs_cpu
def test_blocks_of_concurrent_tasks_do_not_mix():
    async def task(name, barrier):
        with gdn_core.use_backend(name):
            await barrier.wait()
            return chosen()

    async def both():
        barrier = asyncio.Event()
        tasks = [asyncio.create_task(task(name, barrier)) for name in ("reference", "cpu")]
        await asyncio.sleep(0)
        barrier.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(both()) == ["reference", "cpu"]


def test_an_unknown_backend_raises_and_names_the_known_ones():
    with pytest.raises(ValueError, match=r"backend: expected one of cpu, cuda, .*reference, got 'gpu'"):
        gdn_core.use_backend("gpu")
    assert chosen() == AUTOMATIC


def test_an_unavailable_backend_raises_with_the_reason_and_the_command(monkeypatch, rediscover):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    rediscover()
    with pytest.raises(RuntimeError, match="gdn-cpu is not installed") as raised:
        gdn_core.use_backend("cpu")
    assert f'pip install "gdn-core[cpu]=={VERSION}"' in str(raised.value)
    with pytest.raises(RuntimeError), gdn_core.use_backend("cuda"):
        pass
    assert chosen() == "reference"


def test_GDN_BACKEND_is_the_default(monkeypatch, rediscover):
    monkeypatch.setenv("GDN_BACKEND", "reference")
    rediscover()
    assert chosen() == "reference"
    with gdn_core.use_backend(AUTOMATIC):
        assert chosen() == AUTOMATIC
    gdn_core.use_backend(AUTOMATIC)
    assert chosen() == AUTOMATIC
    gdn_core.use_backend(None)
    assert chosen() == "reference"
    monkeypatch.setenv("GDN_BACKEND", "")
    rediscover()
    assert chosen() == AUTOMATIC


def test_a_wrong_GDN_BACKEND_raises_at_the_first_call(monkeypatch, rediscover):
    monkeypatch.setenv("GDN_BACKEND", "fast")
    rediscover()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"expected one of cpu, cuda, .*reference, got 'fast'"):
            gdn_core.rms_norm_gated(**norm_call())


def test_GDN_BACKEND_that_cannot_run_raises_with_the_command(monkeypatch, rediscover):
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    rediscover()
    with pytest.raises(RuntimeError, match="gdn-cuda is not installed") as raised:
        gdn_core.rms_norm_gated(**norm_call())
    assert f"gdn-core[cuda]=={VERSION}" in str(raised.value)


@pytest.mark.parametrize("value", ["cuda", "triton", ""])
def test_GDN_DECODE_KERNEL_takes_its_two_values_and_empty_is_unset(monkeypatch, rediscover, value):
    monkeypatch.setenv("GDN_DECODE_KERNEL", value)
    rediscover()
    assert chosen() == AUTOMATIC


@pytest.mark.parametrize("value", ["CUDA", "cpu", "fla"])
def test_GDN_DECODE_KERNEL_rejects_any_other_value(monkeypatch, rediscover, value):
    monkeypatch.setenv("GDN_DECODE_KERNEL", value)
    rediscover()
    with pytest.raises(ValueError, match=r"GDN_DECODE_KERNEL: expected one of cuda, triton, got"):
        gdn_core.rms_norm_gated(**norm_call())


class FakeCuda:
    """A provider that runs meta tensors, as a stand-in for one of a GPU."""

    name, version, device_types = "cuda", VERSION, ("meta",)

    def __init__(self):
        self.calls = []
        self.ops = {op: self.kernel for op in gdn_core.OPS}

    def kernel(self, *flat, dry_run=False):
        self.calls.append(dry_run)

    def availability(self):
        return None

    def level(self):
        return "9.0"

    def details(self):
        return {}


class FakeEntry:
    name, dist = "cuda", importlib.metadata.distribution("gdn-core")

    def __init__(self, provider):
        self.provider = provider

    def load(self):
        return self.provider


@pytest.mark.parametrize(("value", "reason"), [("cuda", None), ("triton", "GDN_DECODE_KERNEL=triton")])
def test_GDN_DECODE_KERNEL_moves_only_the_fused_decode_off_cuda(monkeypatch, rediscover, value, reason):
    provider = FakeCuda()
    monkeypatch.setenv("GDN_DECODE_KERNEL", value)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (FakeEntry(provider),))
    rediscover()
    for replay in (False, True):
        arguments, _ = inputs.fused_decode_arguments([1, 2], 2, 1, 2, 8, 8, replay=replay)
        op = "fused_gdn_decode_post_conv_mtp" + ("_replay" if replay else "")
        explanation = gdn_core.explain(op, **on_meta(arguments))
        assert explanation.reasons["cuda"] == reason
    assert gdn_core.explain("rms_norm_gated", **on_meta(norm_call())).backend == "cuda"


def with_triton(monkeypatch, ops):
    """Let the backend `triton` have these kernels, of meta tensors."""
    provider = FakeCuda()
    provider.name, provider.ops = "triton", ops
    info = _registry.BackendInfo("triton", "3.9.0", True)
    monkeypatch.setattr(_registry, "_triton", lambda: _registry._Backend(info, provider))


@pytest.mark.parametrize(
    ("value", "takes", "chosen"),
    [
        ("", ("cuda", "triton"), "cuda"),
        ("", ("triton",), "triton"),
        ("triton", ("cuda", "triton"), "triton"),
        ("triton", ("cuda",), None),
        ("cuda", ("cuda", "triton"), "cuda"),
        ("cuda", ("triton",), None),
    ],
    ids=str,
)
def test_GDN_DECODE_KERNEL_decides_between_two_kernels(monkeypatch, rediscover, caplog, value, takes, chosen):
    """The one asked for runs, or the call raises its reason; by default the next one runs, which is logged once."""
    runs = []

    def kernel(name):
        def run(*flat, dry_run=False):
            if name not in takes:
                raise NotImplementedError(f"{name} declines")
            if not dry_run:
                runs.append(name)

        return run

    cuda = FakeCuda()
    cuda.ops = {FUSED_DECODE: kernel("cuda")}
    with_triton(monkeypatch, {FUSED_DECODE: kernel("triton")})
    monkeypatch.setenv("GDN_DECODE_KERNEL", value)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (FakeEntry(cuda),))
    monkeypatch.setattr(_validate, "check", lambda *_: None)  # which has its own word on tensors without values
    _log.forget()
    rediscover()
    arguments = on_meta(inputs.fused_decode_arguments([1, 2], 2, 1, 2, 8, 8)[0])
    explanation = gdn_core.explain(FUSED_DECODE, **arguments)
    assert explanation.backend == chosen
    with caplog.at_level(logging.INFO, "gdn_core"):
        for _ in range(2):
            if chosen is None:
                with pytest.raises(NotImplementedError, match=rf"GDN_DECODE_KERNEL={value}, .*{value} declines"):
                    gdn_core.fused_gdn_decode_post_conv_mtp(**arguments)
            else:
                gdn_core.fused_gdn_decode_post_conv_mtp(**arguments)
    assert runs == ([] if chosen is None else [chosen] * 2)
    if value == "":
        text = f"{FUSED_DECODE} runs on another backend than 'cuda': cuda declines"
        assert [record.getMessage() for record in caplog.records].count(text) == (chosen == "triton")
    else:
        assert explanation.reasons[{"cuda": "triton", "triton": "cuda"}[value]] == f"GDN_DECODE_KERNEL={value}"


def test_the_triton_backend_says_what_it_lacks(monkeypatch):
    provider = triton_backend.provider
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert provider.availability() == "triton is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in provider.availability()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert provider.availability() == "torch finds no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert provider.availability() is None
    monkeypatch.setattr(triton_backend, "_version", lambda distribution: None)
    assert provider.details() == {
        "fla-core": "not installed: prefill and its convolution run on the reference",
        "causal-conv1d": "not installed: its convolutions run on the reference",
    }


@pytest.mark.parametrize("value", ["cuda", ""])
def test_GDN_DECODE_KERNEL_cuda_takes_no_other_kernel(monkeypatch, rediscover, caplog, value):
    """Asked for by name, a kernel that declines a call raises its reason; by default it is logged, and another runs."""
    provider = FakeCuda()

    def decline(*flat, dry_run=False):
        raise NotImplementedError("K: 64 only")

    provider.ops[FUSED_DECODE] = decline
    monkeypatch.setenv("GDN_DECODE_KERNEL", value)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (FakeEntry(provider),))
    rediscover()
    arguments, _ = inputs.fused_decode_arguments([1, 2], 2, 1, 2, 8, 8)
    explanation = gdn_core.explain(FUSED_DECODE, **on_meta(arguments))
    assert explanation.reasons["cuda"] == "K: 64 only"
    if value == "cuda":
        assert explanation.backend is None
        monkeypatch.setattr(_validate, "check", lambda *_: None)  # which has its own word on tensors without values
        with pytest.raises(NotImplementedError, match=r"GDN_DECODE_KERNEL=cuda, .*K: 64 only"):
            gdn_core.fused_gdn_decode_post_conv_mtp(**on_meta(arguments))
    else:
        with caplog.at_level(logging.INFO, "gdn_core"), pytest.raises(NotImplementedError, match="on device meta"):
            gdn_core.fused_gdn_decode_post_conv_mtp(**on_meta(arguments))  # the reference has no values to read
        assert "K: 64 only" in caplog.text
    gdn_core.fused_gdn_decode_post_conv_mtp(**inputs.fused_decode_arguments([1, 2], 2, 1, 2, 8, 8)[0])  # on the CPU


@pytest.mark.parametrize(("value", "expected"), [("1", ["dry", "values", "run"]), ("", ["run"])])
def test_GDN_DEBUG_reads_what_lies_on_a_device(monkeypatch, rediscover, value, expected):
    """A kernel on a device leaves indices unread, since that would mean to wait; under GDN_DEBUG=1 they are checked."""
    provider, events = FakeCuda(), []
    provider.ops[FUSED_DECODE] = lambda *flat, dry_run=False: events.append("dry" if dry_run else "run")
    monkeypatch.setenv("GDN_DEBUG", value)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (FakeEntry(provider),))
    monkeypatch.setattr(_validate, "check", lambda *_: events.append("values"))
    rediscover()
    arguments, _ = inputs.fused_decode_arguments([1, 2], 2, 1, 2, 8, 8)
    gdn_core.fused_gdn_decode_post_conv_mtp(**on_meta(arguments))
    assert events == expected


def on_meta(arguments):
    moved = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            value = value.to("meta")
        elif isinstance(value, gdn_core.ReplayRecords):
            value = gdn_core.ReplayRecords.from_tensors(*(x.to("meta") for x in vars(value).values()))
        moved[name] = value
    return moved


def test_tensors_go_to_the_backend_of_their_device(monkeypatch, rediscover):
    provider = FakeCuda()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (FakeEntry(provider),))
    rediscover()
    with gdn_core.record_calls() as calls:
        gdn_core.rms_norm_gated(**on_meta(norm_call()))
        gdn_core.rms_norm_gated(**norm_call())
    assert calls == {("rms_norm_gated", "cuda"): 1, ("rms_norm_gated", "reference"): 1}
    assert provider.calls == [False]
    with gdn_core.use_backend("cuda"), pytest.raises(NotImplementedError, match="runs meta tensors, these are on cpu"):
        gdn_core.rms_norm_gated(**norm_call())


# --- what stands between a call and its kernel ------------------------------------------------------------------------


def functions_entered(function):
    """Count the functions that a call runs through: those of Python, and those of C."""
    counts = {"call": -1, "c_call": -1}  # `function` itself, and the end of the count

    def count(frame, event, argument):
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"]


# More than the op, run_eager and is_dynamo_compiling, and than what run_eager asks of C.
BEYOND_OTHERS = {
    "fused_gdn_gating": (1, 3),  # allocates g and beta
    "chunk_gated_delta_rule": (0, 2),  # looks at the dimensions of q and v
    "fused_recurrent_gated_delta_rule": (0, 2),
    "fused_sigmoid_gating_delta_rule_update_replay": (1, 1),  # takes the records apart
    "fused_gdn_decode_post_conv_mtp_replay": (1, 1),
}


@pytest.mark.parametrize("op", gdn_core.OPS)
def test_an_eager_call_asks_little(op, monkeypatch):
    """Other work empties the caches between calls: then each function that a call enters costs a microsecond or two."""
    arguments, function = small_call(op), getattr(gdn_core, op)
    nothing = "".format  # a function of C that takes whatever it is given
    monkeypatch.setattr(_dispatch, "_fast", {_dispatch._choice(): {op: nothing}})
    for name in ("any_requires_grad", "_increment_version"):  # of older torch these are in Python
        monkeypatch.setattr(_dispatch, name, nothing)
    python, native = BEYOND_OTHERS.get(op, (0, 0))
    written = sum(argument.alias_info is not None for argument in getattr(torch.ops.gdn, op).default._schema.arguments)
    marking = 2 + written  # look up which, collect them, tell autograd
    for guard, more_python, more_native in (
        (torch.inference_mode, 0, 0),
        (torch.no_grad, 1, marking),
        (torch.enable_grad, 1, marking + 1),
    ):
        with guard():
            function(**arguments)  # what is looked up once
            entered = functions_entered(lambda: function(**arguments))
        assert entered[0] <= 3 + python + more_python, guard.__name__
        assert entered[1] <= 8 + native + more_native, guard.__name__


# --- forced and unforced calls ----------------------------------------------------------------------------------------


def decode_call(**sizes):
    shape = {"H": 1, "HV": 2, "K": 16, "V": 16, **sizes}
    dtype = shape.pop("dtype", torch.float32)
    return inputs.decode_arguments([1, 1], **shape, dtype=dtype, state_dtype=torch.float32)[0]


@needs_cpu
@pytest.mark.parametrize(
    ("op", "call", "constraint"),
    [
        ("fused_sigmoid_gating_delta_rule_update", lambda: decode_call(K=300), "K and V: from 1 to 256"),
        ("fused_sigmoid_gating_delta_rule_update", lambda: decode_call(V=257), "K and V: from 1 to 256"),
        ("rms_norm_gated", lambda: inputs.norm_arguments((2, 8), dtype=torch.float64), "float64 runs on the reference"),
        (
            "fused_gdn_gating",
            lambda: inputs.gating_arguments((3, 4), dtype=torch.float64),
            "float64 runs on the reference",
        ),
    ],
)
def test_a_call_that_cpu_declines_raises_when_forced_and_falls_back_otherwise(caplog, op, call, constraint):
    before, arguments = call(), call()
    with gdn_core.use_backend("cpu"):
        with pytest.raises(NotImplementedError) as raised:
            getattr(gdn_core, op)(**arguments)
        assert op in str(raised.value) and "'cpu'" in str(raised.value) and constraint in str(raised.value)
        assert gdn_core.explain(op, **arguments).backend is None
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, arguments[name]), f"{name} changed although the call was declined"

    explanation = gdn_core.explain(op, **arguments)
    assert explanation.backend == "reference"
    assert constraint in explanation.reasons["cpu"]
    with caplog.at_level(logging.INFO, "gdn_core"), gdn_core.record_calls() as calls:
        for _ in range(3):
            getattr(gdn_core, op)(**call())
    assert calls == {(op, "reference"): 3}
    ours = [record for record in caplog.records if record.name == "gdn_core"]
    assert [record.levelno for record in ours] == [logging.INFO]
    assert op in ours[0].getMessage() and constraint in ours[0].getMessage()


@needs_cpu
def test_a_forced_backend_without_the_kernel_says_so():
    provider = _registry.provider("cpu")
    arguments = {
        "causal_conv1d_update": lambda: inputs.conv_update_arguments([1, 1], 4, 3)[0],
        "fused_sigmoid_gating_delta_rule_update_spec": lambda: inputs.spec_arguments([1], 2, 1, 1, 8, 8)[0],
    }
    for op, call in arguments.items():
        if op in provider.ops:
            continue
        with gdn_core.use_backend("cpu"), pytest.raises(NotImplementedError, match=f"has no kernel for {op}"):
            getattr(gdn_core, op)(**call())
        with gdn_core.record_calls() as calls:
            getattr(gdn_core, op)(**call())
        assert calls == {(op, "reference"): 1}


@needs_cpu
def test_a_wrong_argument_is_reported_as_such_even_when_the_backend_declines():
    wrong = decode_call(K=300)
    wrong["a"] = wrong["a"][:, :1]
    for name in ("cpu", "reference"):
        with gdn_core.use_backend(name), pytest.raises(ValueError, match=r"^a: expected"):
            gdn_core.fused_sigmoid_gating_delta_rule_update(**wrong)


@needs_cpu
def test_no_message_when_the_native_kernel_runs(caplog):
    with caplog.at_level(logging.DEBUG, "gdn_core"), gdn_core.record_calls() as calls:
        gdn_core.rms_norm_gated(**norm_call())
        gdn_core.fused_sigmoid_gating_delta_rule_update(**decode_call())
    assert set(calls) == {("rms_norm_gated", "cpu"), ("fused_sigmoid_gating_delta_rule_update", "cpu")}
    assert not caplog.records


@needs_cpu
def test_a_parameter_that_needs_a_gradient_is_a_warning_once_with_the_remedy(caplog):
    arguments = norm_call()
    arguments["weight"] = torch.nn.Parameter(arguments["weight"])
    with caplog.at_level(logging.INFO, "gdn_core"), gdn_core.record_calls() as calls:
        results = [gdn_core.rms_norm_gated(**arguments) for _ in range(2)]
    assert all(y.requires_grad for y in results)
    assert calls == {("rms_norm_gated", "reference"): 2}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "torch.no_grad()" in caplog.text and "torch.inference_mode()" in caplog.text

    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet(), gdn_core.record_calls() as calls:
            assert not gdn_core.rms_norm_gated(**arguments).requires_grad
        assert calls == {("rms_norm_gated", "cpu"): 1}


@needs_cpu
def test_a_gradient_of_a_forced_backend_raises():
    arguments = norm_call()
    arguments["x"].requires_grad_()
    with gdn_core.use_backend("cpu"), pytest.raises(NotImplementedError, match=r"'cpu' has no gradient.*no_grad"):
        gdn_core.rms_norm_gated(**arguments)
    with gdn_core.use_backend("reference"):
        assert gdn_core.rms_norm_gated(**arguments).requires_grad


# --- explain and record_calls -----------------------------------------------------------------------------------------


def test_explain_gives_every_backend_a_reason_and_reads_well():
    explanation = gdn_core.explain("rms_norm_gated", **norm_call())
    assert explanation.op == "rms_norm_gated"
    assert list(explanation.reasons) == [info.name for info in gdn_core.backends()]
    assert explanation.reasons[explanation.backend] is None
    lines = str(explanation).splitlines()
    assert lines[0] == f"rms_norm_gated runs on {explanation.backend}"
    assert [line.split(":")[0].strip() for line in lines[1:]] == list(explanation.reasons)
    assert rows()["cuda"].available or rows()["cuda"].reason in str(explanation)


def test_explain_runs_nothing():
    arguments, guarded = inputs.decode_arguments([1, 1], 1, 2, 16, 16)
    pool, out = guarded.pool.clone(), torch.full_like(arguments["v"], 7)
    with gdn_core.record_calls() as calls:
        gdn_core.explain("fused_sigmoid_gating_delta_rule_update", **arguments, out=out)
        with gdn_core.use_backend("reference"):
            gdn_core.explain("fused_sigmoid_gating_delta_rule_update", **arguments, out=out)
    assert torch.equal(guarded.pool, pool)
    assert bool((out == 7).all())
    assert not calls


def test_explain_with_a_forced_backend():
    with gdn_core.use_backend("reference"):
        explanation = gdn_core.explain("rms_norm_gated", **norm_call())
    assert explanation.backend == "reference"
    if HAS_CPU:
        assert "forced" in explanation.reasons["cpu"]


def test_explain_of_a_call_that_would_raise():
    explanation = gdn_core.explain("rms_norm_gated", **norm_call(weight=torch.ones(9)))
    assert explanation.backend is None
    assert "weight: expected" in explanation.reasons["reference"]
    assert "raises" in str(explanation)


def test_explain_of_a_call_that_needs_a_gradient():
    arguments = norm_call()
    arguments["x"].requires_grad_()
    explanation = gdn_core.explain("rms_norm_gated", **arguments)
    assert explanation.backend == "reference"
    if HAS_CPU:
        assert "gradient" in explanation.reasons["cpu"]
    pool_update = decode_call()
    pool_update["q"].requires_grad_()
    explanation = gdn_core.explain("fused_sigmoid_gating_delta_rule_update", **pool_update)
    assert explanation.backend is None, "the call itself raises: it updates a pool"


def test_explain_of_an_unknown_op_names_the_known_ones():
    with pytest.raises(ValueError, match=r"op: expected one of fused_gdn_gating, .*, got 'softmax'"):
        gdn_core.explain("softmax", torch.ones(2))


@needs_cpu
def test_record_calls_counts_every_thread_and_path():
    step = decode_call()
    with gdn_core.record_calls() as calls:
        gdn_core.rms_norm_gated(**norm_call())
        in_thread(lambda: gdn_core.rms_norm_gated(**norm_call()))
        torch.compile(gdn_core.rms_norm_gated, backend="eager", fullgraph=True)(**norm_call())
        gdn_core.fused_sigmoid_gating_delta_rule_update(**step)
        with gdn_core.use_backend("reference"), gdn_core.record_calls() as inner:
            gdn_core.rms_norm_gated(**norm_call())
    gdn_core.rms_norm_gated(**norm_call())
    assert inner == {("rms_norm_gated", "reference"): 1}
    assert calls == {
        ("rms_norm_gated", "cpu"): 3,
        ("rms_norm_gated", "reference"): 1,
        ("fused_sigmoid_gating_delta_rule_update", "cpu"): 1,
    }


# --- threads ----------------------------------------------------------------------------------------------------------


@needs_cpu
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_call_of_less_than_100_us_starts_no_thread():
    found = run_python("""
        import json, os, torch, gdn_core
        from gdn_core.testing import inputs

        def num_tasks():
            return len(os.listdir("/proc/self/task"))

        torch.set_num_threads(1)
        small = inputs.gating_arguments((1024, 100)), inputs.norm_arguments((1024, 1, 100))
        large = inputs.norm_arguments((1024, 2, 128))  # torch's own operators start no worker
        torch.set_num_threads(2)
        tasks = [num_tasks()]
        with gdn_core.use_backend("cpu"):
            gdn_core.fused_gdn_gating(**small[0])
            gdn_core.rms_norm_gated(**small[1])
            tasks.append(num_tasks())
            gdn_core.rms_norm_gated(**large)
            tasks.append(num_tasks())
        print(json.dumps([count - tasks[0] for count in tasks]))
    """)
    assert found == [0, 0, 1]


# --- importing --------------------------------------------------------------------------------------------------------

IMPORT = """
    import importlib.metadata, json, platform, sys
    import torch
    {before}
    before = set(sys.modules)
    import gdn_core
    new = set(sys.modules) - before
    print(json.dumps({{
        "new": sorted(new),
        "wrong": sorted(set(sys.modules) & {{"transformers", "triton", "rich", "gdn_cpu", "gdn_cuda", "fla"}}),
        "discovered": gdn_core._registry._backends is not None,
    }}))
"""


def import_in_a_new_interpreter(before="", **env):
    return run_python(textwrap.dedent(IMPORT).format(before=before), **env)


def test_importing_loads_no_backend_and_little_else():
    # A wrong GDN_BACKEND must not matter before a call, nor may anyone look for entry points.
    forbid = "importlib.metadata.entry_points = None"
    found = import_in_a_new_interpreter(forbid, GDN_BACKEND="no such backend", GDN_DECODE_KERNEL="neither")
    assert not found["wrong"]
    assert not found["discovered"]
    others = [name for name in found["new"] if name.split(".")[0] not in ("gdn_core", "torch", "importlib")]
    assert len(others) <= 12, f"importing gdn_core drags in {others}"
    heavy = ("gdn_core.cli", "gdn_core.testing", "gdn_core.integrations", "torch._dynamo", "torch._inductor")
    assert not [name for name in found["new"] if name.startswith(heavy)]


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64")])
def test_importing_works_on_other_platforms(system, machine):
    pretend = f"platform.system = lambda: '{system}'; platform.machine = lambda: '{machine}'"
    assert not import_in_a_new_interpreter(pretend)["wrong"]


@pytest.mark.slow
def test_importing_takes_less_than_60_ms_beyond_torch(tmp_path):
    code = """
        import json, time, torch
        start = time.process_time()
        import gdn_core
        print(json.dumps(time.process_time() - start))
    """
    # The first run compiles the modules, which an installation does once.
    cached = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    assert min(run_python(code, **cached) for _ in range(6)) < 0.060


# --- signatures -------------------------------------------------------------------------------------------------------

DECODE = "use_qk_l2norm_in_kernel=False, softplus_beta=1.0, softplus_threshold=20.0, *, scale=None, "
FUSED = (
    "out=None, scale=None, norm_eps=1e-5, *, output_gate_activation='silu', num_key_heads=None, head_k_dim=128, "
    "state_v_first=True, null_slot=None"
)
SIGNATURES = {
    "fused_gdn_gating": "A_log, a, b, dt_bias, *, softplus_beta=1.0, softplus_threshold=20.0",
    "chunk_gated_delta_rule": (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, *, state_indices=None, has_initial_state=None, "
        "null_slot=None, output_chunk_states=False, out=None"
    ),
    "fused_recurrent_gated_delta_rule": (
        "q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False, "
        "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, *, "
        "state_indices=None, has_initial_state=None, null_slot=None, out=None"
    ),
    "fused_sigmoid_gating_delta_rule_update": (
        "A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens=None, "
        f"{DECODE}state_v_first=False, null_slot=None, out=None"
    ),
    "fused_sigmoid_gating_delta_rule_update_spec": (
        "A_log, dt_bias, q, k, v, a, b, initial_state_source, spec_state_indices, num_accepted_tokens, cu_seqlens, "
        f"{DECODE}state_v_first=False, null_slot=None, out=None"
    ),
    "fused_sigmoid_gating_delta_rule_update_replay": (
        "A_log, dt_bias, q, k, v, a, b, state, slot_indices, records, num_accepted_tokens, cu_seqlens, "
        f"{DECODE}state_v_first=False, null_slot=None, out=None"
    ),
    "causal_conv1d_fn": (
        "x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None, "
        "activation=None, *, conv_states=None, query_start_loc=None, cache_indices=None, has_initial_state=None, "
        "null_slot=None, out=None"
    ),
    "causal_conv1d_update": (
        "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None, *, "
        "num_accepted_tokens=None, query_start_loc=None, null_slot=None, out=None"
    ),
    "rms_norm_gated": "x, gate, weight, eps, *, activation='silu', out=None",
    "fused_gdn_decode_post_conv_mtp": (
        "mixed_qkv, a, b, A_log, dt_bias, state_indices, cu_seqlens, num_accepted_tokens, state, output_gate, "
        f"norm_weight, {FUSED}"
    ),
    "fused_gdn_decode_post_conv_mtp_replay": (
        "mixed_qkv, a, b, A_log, dt_bias, slot_indices, records, cu_seqlens, num_accepted_tokens, state, "
        f"output_gate, norm_weight, {FUSED}"
    ),
}


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("module", [gdn_core, gdn_core.reference, oracle], ids=lambda module: module.__name__)
@pytest.mark.parametrize("op", SIGNATURES)
def test_signature(op, module):
    expected = eval(f"lambda {SIGNATURES[op]}: None")
    assert parameters(getattr(module, op)) == parameters(expected)


def test_the_constructor_of_the_records_has_the_documented_signature():
    expected = eval("lambda num_slots, S, H, HV, K, V, dtype, device=None: None")
    assert parameters(gdn_core.ReplayRecords) == parameters(expected)


def test_ops_are_the_public_functions():
    assert set(gdn_core.OPS) == set(SIGNATURES)
    assert set(SIGNATURES) <= set(gdn_core.__all__)


@pytest.mark.parametrize("op", gdn_core.OPS)
def test_arguments_by_name_are_in_the_order_of_the_schema(op):
    """Whoever makes them so is told when an op has got another argument."""
    names = [argument.name for argument in getattr(torch.ops.gdn, op).default._schema.arguments]
    values = {name: object() for name in reversed(names)}
    made = _schema.arguments_of(op)(**values)
    assert isinstance(made, tuple) and list(made) == [values[name] for name in names]
    with pytest.raises(TypeError, match="missing"):
        _schema.arguments_of(op)(**{name: None for name in names[1:]})
    with pytest.raises(TypeError, match="another"):
        _schema.arguments_of(op)(**values, another=None)
