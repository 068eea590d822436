"""@kernel, calling a kernel as a function, and finding kernels by name and by module."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_samples import NAME, right, subject
from torch import Tensor

from conformance import ConformanceError, Kernel, kernel, report_path
from conformance.registry import kernels, operator, put_checkout_first, selector

REGISTRY = sys.modules["conformance.decorator"]._REGISTRY
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def registry() -> Iterator[dict[tuple[str, str], Kernel]]:
    """What a test registers is gone after it."""
    kernels(NAME)  # load those of this repository first
    before = dict(REGISTRY)
    yield REGISTRY
    REGISTRY.clear()
    REGISTRY.update(before)


def filled(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out, config=None):  # type: ignore[no-untyped-def]
    report_path(f"filled {config}")
    out.copy_(right(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))


def returned(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out_dtype):  # type: ignore[no-untyped-def]
    return right(x, token_topk_to_pos, topk_weights, x_sf, sf, out_dtype)


def arguments() -> dict[str, Tensor]:
    return {"x": torch.arange(4.0)[:, None].expand(4, 256).contiguous(),
            "token_topk_to_pos": torch.tensor([[1, 2], [3, -1], [-1, -1]], dtype=torch.int32)}


EXPECTED = [3.0, 3.0, 0.0]


class Called:
    def __call__(self, x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):  # type: ignore[no-untyped-def]
        filled(x, token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf, out=out)


@pytest.mark.parametrize("made", [functools.partial(filled, config="fast"), Called(), Called().__call__])
def test_whatever_can_be_called_can_be_a_kernel(made: Any) -> None:
    one = kernel(NAME, name="made")(made)
    assert one(**arguments())[:, 0].tolist() == EXPECTED and one.modules == (__name__,)


def test_what_has_no_name_of_its_own_needs_one() -> None:
    with pytest.raises(ConformanceError, match=f"a kernel of {NAME} is a partial, which has no name of its own: give "
                                               "it name="):
        kernel(NAME)(functools.partial(filled))


def test_a_kernel_may_be_named_before_the_module_that_defines_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    source = DEFINITION.format(NAME, "first_one") + DEFINITION.format(NAME, "other")
    module(tmp_path, "later_module", source, monkeypatch)
    assert [one.name for one in kernels(NAME, ["first_one", "later_module"])] == ["first_one", "other"]


def test_a_bound_call_validates_nothing_and_can_be_made_again() -> None:
    made = subject(filled)
    out = torch.full((3, 256), 7.0)
    call = made.bound(arguments(), out)
    call()
    assert out[:, 0].tolist() == EXPECTED
    out.fill_(7.0)
    call()
    assert out[:, 0].tolist() == EXPECTED
    with pytest.raises(TypeError, match="has no parameter 'bias', which this case gives"):
        made.bound({**arguments(), "bias": out}, out)
    with pytest.raises(TypeError, match="no parameter 'bias', 'more', which this case gives; add"):
        made.bound({**arguments(), "bias": out, "more": 1}, out)


def test_rest_takes_what_has_no_name() -> None:
    def open_ended(x, token_topk_to_pos, *, out, **rest):  # type: ignore[no-untyped-def]
        assert set(rest) == {"topk_weights", "x_sf", "sf", "bias"}
        out.copy_(right(x, token_topk_to_pos, rest["topk_weights"], rest["x_sf"], rest["sf"], out.dtype))

    made, out = subject(open_ended), torch.full((3, 256), 7.0)
    given = {**dict.fromkeys(("topk_weights", "x_sf", "sf")), **arguments(), "bias": 1}
    made.bound(given, out)()
    assert out[:, 0].tolist() == EXPECTED and made.fills_out


def test_roles() -> None:
    assert [kernel.role for kernel in kernels(NAME)] == ["candidate", "baseline", "pytorch"]
    with pytest.raises(ConformanceError, match="unknown role of @kernel 'base'"):
        kernel(NAME, role="base")


# ---- registering ----------------------------------------------------------------------------------------------------


def test_a_registered_kernel(registry: dict[tuple[str, str], Kernel]) -> None:
    made = kernel(NAME, promise="published", about="test", devices=("cpu",), configs=("a", "b"), strided=True)(filled)
    assert isinstance(made, Kernel)
    assert registry[NAME, "filled"] is made
    assert made in kernels(NAME)
    assert (made.name, made.operator, made.promise, made.about) == ("filled", NAME, "published", "test")
    assert (made.devices, made.configs, made.strided, made.repeatable) == (("cpu",), ("a", "b"), True, True)
    assert made.function is filled
    assert made.fills_out
    assert made.module == __name__
    assert "out" in made.parameters
    assert not kernel(NAME, name="other")(returned).fills_out


def test_defaults() -> None:
    made = kernel(NAME, name="plain")(filled)
    assert (made.name, made.promise, made.devices, made.configs) == ("plain", "within-budget", ("cpu", "cuda"), ())
    assert (made.supports, made.requires, made.prepare) == (None, None, None)


@pytest.mark.parametrize(("options", "message"), [
    ({"promise": "bitexact"}, "unknown promise 'bitexact'. Did you mean 'bit-exact'? Known: bit-exact, publ"),
    ({"suports": None}, "unknown option of @kernel 'suports'. Did you mean 'supports'?"),
    ({"devices": ("cpu", "gpu")}, "unknown device of @kernel 'gpu'"),
    ({"devices": "cpu"}, "@kernel: devices='cpu' is not a tuple of strings, as in devices=('cpu',)"),
    ({"native": "fast"}, "@kernel: native='fast' is not a tuple of strings"),
    ({"configs": (1,)}, "@kernel: configs=(1,) is not a tuple of strings"),
    ({"supports": "no"}, "@kernel: supports='no' is not a function or None"),
    ({"repeatable": "yes"}, "@kernel: repeatable='yes' is not True, False, or a function of the case's parameters"),
    ({"strided": 1}, "@kernel: strided=1 is not True or False"),
    ({"about": 5}, "@kernel: about=5 is not a string"),
    ({"role": ["x"]}, "@kernel: role=['x'] is not a string"),
    ({"promise": 5}, "unknown promise '5'"),
    ({"name": "a[b]::c"}, "@kernel: 'a[b]::c' is no name for a kernel: give name= letters, digits, _ . + -"),
    ({"name": ""}, "@kernel: '' is no name for a kernel"),
    ({"name": 5}, "@kernel: 5 is no name for a kernel"),
])
def test_a_wrong_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConformanceError) as raised:
        kernel(NAME, **options)(filled)
    assert message in str(raised.value)


def test_lists_are_taken_as_tuples() -> None:
    assert kernel(NAME, name="listed", devices=["cpu"])(filled).devices == ("cpu",)


def test_a_lambda_needs_a_name() -> None:
    with pytest.raises(ConformanceError, match="'<lambda>' is no name for a kernel: give name="):
        kernel(NAME)(lambda x: x)


def test_configurations_need_a_parameter_to_force_one() -> None:
    with pytest.raises(ConformanceError, match="kernel returned declares configs= and has no parameter 'config'"):
        kernel(NAME, configs=("a",))(returned)


def test_two_kernels_of_one_name_are_refused() -> None:
    kernel(NAME, name="twin")(filled)
    kernel(NAME, name="twin")(filled)  # its module was reloaded
    with pytest.raises(ConformanceError) as raised:
        kernel(NAME, name="twin")(returned)
    assert f"two kernels of {NAME} are called 'twin'" in str(raised.value)
    assert f"{__name__}.filled and {__name__}.returned" in str(raised.value)
    with pytest.raises(ConformanceError, match="are called 'h_tiled'"):
        kernel(NAME, name="h_tiled")(filled)


# ---- calling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [filled, returned])
def test_calling_by_place_and_by_name(function: Any) -> None:
    given, called = arguments(), subject(function)
    weights = torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 1.0]])
    for result in (
        called(given["x"], given["token_topk_to_pos"]), called(**given), called(given["x"], **{
            "token_topk_to_pos": given["token_topk_to_pos"]}),
    ):
        assert result[:, 0].tolist() == EXPECTED
        assert result.shape == (3, 256)
        assert result.dtype == torch.float32
    assert called(*given.values(), weights)[:, 9].tolist() == [3.0, 6.0, 0.0]
    assert called(**given, topk_weights=weights)[:, 9].tolist() == [3.0, 6.0, 0.0]


@pytest.mark.parametrize("function", [filled, returned])
def test_the_output_dtype(function: Any) -> None:
    called = subject(function)
    result = called(**arguments(), sf=torch.tensor([100.0]), out_dtype=E4M3)
    assert result.dtype == E4M3
    assert result.float()[:, 0].tolist() == [288.0, 288.0, 0.0]  # 300 lies between 288 and 320
    assert called(**arguments(), out_dtype=E4M3).dtype == E4M3
    with pytest.raises(TypeError, match=r"out has dtype torch\.float16"):
        called(**arguments(), out_dtype=torch.float16)
    with pytest.raises(ValueError, match="sf requires a float8_e4m3fn output"):
        called(**arguments(), sf=torch.ones(1))


def test_an_output_given_is_the_one_that_is_filled() -> None:
    out = torch.full((3, 256), -1.0)
    assert subject(filled)(**arguments(), out=out) is out
    assert out[:, 0].tolist() == EXPECTED


def test_a_configuration_can_be_forced() -> None:
    out = torch.empty(3, 256)
    assert subject(filled).run(arguments(), out, "tile:64") == (out, "filled tile:64")
    assert subject(filled).run(arguments(), out) == (out, "filled None")
    assert subject(filled)(**arguments(), config="x")[0, 0] == 3.0
    with pytest.raises(TypeError, match="kernel returned has no parameter 'config', config='x' is given"):
        subject(returned)(**arguments(), config="x")


@pytest.mark.parametrize(("args", "kwargs", "message"), [
    ((), {"wieghts": None}, "filled has no argument 'wieghts'; it takes x, token_topk_to_pos, topk_weights, x_sf, sf"),
    ((None,) * 6, {}, "filled takes 5 arguments: x, token_topk_to_pos, topk_weights, x_sf, sf"),
    ((torch.zeros(1, 256),), {"x": torch.ones(1, 256)}, "filled got its argument 'x' twice: by place and by name"),
    ((), {}, "x is None: a tensor is required"),
])
def test_wrong_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        subject(filled)(*args, **kwargs)
    assert message in str(raised.value)


def test_an_argument_that_the_function_does_not_take() -> None:
    def narrow(x, token_topk_to_pos, out):  # type: ignore[no-untyped-def]
        out.copy_(right(x, token_topk_to_pos, None, None, None, out.dtype))

    called = subject(narrow)
    assert called(**arguments())[:, 0].tolist() == EXPECTED
    with pytest.raises(TypeError, match="kernel narrow has no parameter 'topk_weights', which this case gives"):
        called(**arguments(), topk_weights=torch.ones(3, 2))


# ---- the path that ran ----------------------------------------------------------------------------------------------


def test_the_last_path_that_is_reported_counts() -> None:
    def dispatches(x, token_topk_to_pos, out):  # type: ignore[no-untyped-def]
        report_path("slow")
        report_path("fast")
        out.zero_()

    def silent(x, token_topk_to_pos, out):  # type: ignore[no-untyped-def]
        out.zero_()

    out = torch.empty(3, 256)
    assert subject(dispatches).run(arguments(), out)[1] == "fast"
    assert subject(silent).run(arguments(), out)[1] is None
    report_path("outside a run, nobody listens")


def test_paths_of_nested_kernels_stay_apart() -> None:
    inner = subject(filled)

    def outer(x, token_topk_to_pos, out):  # type: ignore[no-untyped-def]
        inner(x, token_topk_to_pos, out=out)
        report_path("outer, after the inner one")

    assert subject(outer).run(arguments(), torch.empty(3, 256))[1] == "outer, after the inner one"


def test_a_path_is_forgotten_when_a_kernel_raises() -> None:
    def raises(x, token_topk_to_pos, out):  # type: ignore[no-untyped-def]
        report_path("broken")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        subject(raises).run(arguments(), torch.empty(3, 256))
    assert subject(filled).run(arguments(), torch.empty(3, 256))[1] == "filled None"


# ---- finding --------------------------------------------------------------------------------------------------------


def test_kernels_by_name_in_the_order_asked_for() -> None:
    assert {"h_tiled", "per_token", "vectorised"} <= {k.name for k in kernels(NAME)}
    assert [k.name for k in kernels(NAME, ["vectorised", "h_tiled"])] == ["vectorised", "h_tiled"]
    assert [k.name for k in kernels(NAME, ["vectorised", "vectorised"])] == ["vectorised"]


def test_an_unknown_kernel_lists_the_known_ones() -> None:
    with pytest.raises(ConformanceError, match=r"unknown kernel 'h_tilde'\. Did you mean 'h_tiled'\? Known: h_ti"):
        kernels(NAME, ["h_tilde"])


def module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(f"from conformance import kernel\n{text}")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)


DEFINITION = '@kernel("{}", name="{}")\ndef anything(x, token_topk_to_pos, out):\n    out.zero_()\n'


def test_kernels_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "module_of_one_kernel", DEFINITION.format(NAME, "my_own"), monkeypatch)
    (found,) = kernels(NAME, ["module_of_one_kernel"])
    assert (found.name, found.module) == ("my_own", "module_of_one_kernel")
    assert [k.name for k in kernels(NAME, ["my_own", "vectorised"])] == ["my_own", "vectorised"]
    assert selector(found) == "module_of_one_kernel"  # a fresh process does not know the name
    assert selector(kernels(NAME, ["vectorised"])[0]) == "vectorised"


@pytest.mark.parametrize(("text", "message"), [
    ("", "module odd_module defines no kernel: decorate a function with @conformance.kernel"),
    ("import no_such_package\n", "kernel module odd_module cannot be imported: ModuleNotFoundError: No module named"),
    ("1 / 0\n", "kernel module odd_module cannot be imported: ZeroDivisionError: division by zero (odd_module.py"),
    ("raise BaseException('a\\nb')\n", "kernel module odd_module cannot be imported: BaseException: a b (odd_module"),
    ("@kernel\ndef k(out):\n    pass\n", "@kernel needs its operator, as in @kernel('OPERATOR'); it was given 'k' ("),
    ('kernel("moe_sorting")(3)\n', "@kernel('moe_sorting') decorates a function, not 3 (odd_module.py, line "),
    (DEFINITION.format("moe_reduce_fusd", "k"),
     "unknown operator of kernel k in odd_module: 'moe_reduce_fusd'. Did you mean 'moe_reduce_fused'?"),
    ('@kernel("moe_reduce_fused", promise="best")\ndef k(out):\n    pass\n', "unknown promise 'best'"),
])
def test_a_module_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    module(tmp_path, "odd_module", text, monkeypatch)
    with pytest.raises(ConformanceError) as raised:
        kernels(NAME, ["odd_module"])
    assert message in str(raised.value)


def test_an_unknown_operator_lists_the_known_ones() -> None:
    with pytest.raises(ConformanceError, match=r"unknown operator 'moe_reduce_fuse'\. Did you mean 'moe_reduce_fused'"):
        operator("moe_reduce_fuse")


def test_another_package_called_kernels_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = type(sys)("kernels")
    stranger.__path__ = ["/elsewhere/kernels"]
    stranger.__file__ = "/elsewhere/kernels/__init__.py"
    monkeypatch.setitem(sys.modules, "kernels", stranger)
    with pytest.raises(ConformanceError, match=r"'kernels' was imported from /elsewhere/kernels/__init__\.py, not"):
        put_checkout_first()


def test_a_module_brings_all_its_kernels_also_when_one_is_called_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_text = "@kernel('moe_reduce_fused')\ndef {}(x, token_topk_to_pos, *, out): ...\n"
    source = "from conformance import kernel\n" + kernel_text.format("namesake") + kernel_text.format("other")
    (tmp_path / "namesake.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):  # imported by the first call, known to the second
        assert [found.name for found in kernels(NAME, ["namesake"])] == ["namesake", "other"]
    assert [found.name for found in kernels(NAME, ["other"])] == ["other"]


@pytest.mark.parametrize("name", ["../x", "a b", "no_such_thing"])
def test_what_is_no_module_and_no_kernel_is_an_unknown_kernel(name: str) -> None:
    with pytest.raises(ConformanceError, match=r"unknown kernel .* Known: h_tiled, .*per_token, .*vectorised"):
        kernels(NAME, [name])


# ---- kernels that a factory makes -----------------------------------------------------------------------------------

FACTORY = f'''
def make(name):
    def made(x, token_topk_to_pos, out):
        out.zero_()
    return kernel("{NAME}", name=name)(made)
'''


def test_a_module_offers_what_a_factory_elsewhere_made_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what the factory's module made for itself or for others."""
    module(tmp_path, "factory_of_kernels", FACTORY + 'make("made_at_home")\n', monkeypatch)
    for number in (1, 2):
        module(tmp_path, f"asks_a_factory_{number}", f'import factory_of_kernels\nfactory_of_kernels.make("made_for_'
               f'{number}")\n', monkeypatch)
    for number in (1, 2):
        (found,) = kernels(NAME, [f"asks_a_factory_{number}"])
        assert (found.name, found.module) == (f"made_for_{number}", f"asks_a_factory_{number}")
        assert found.modules == (f"asks_a_factory_{number}", "factory_of_kernels")
        assert selector(found) == f"asks_a_factory_{number}"
    assert [k.name for k in kernels(NAME, ["factory_of_kernels"])] == ["made_at_home"]


def test_a_module_offers_what_it_imports_by_name_when_it_has_nothing_else(tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "has_kernels", DEFINITION.format(NAME, "first_of_two") + DEFINITION.format(
        NAME, "second_of_two").replace("anything", "something"), monkeypatch)
    module(tmp_path, "passes_one_on", "from has_kernels import something\n", monkeypatch)
    (found,) = kernels(NAME, ["passes_one_on"])
    assert (found.name, found.module) == ("second_of_two", "has_kernels")
    module(tmp_path, "only_imports", "import has_kernels\n", monkeypatch)
    with pytest.raises(ConformanceError, match="module only_imports defines no kernel"):
        kernels(NAME, ["only_imports"])


def test_a_module_without_kernels_names_those_that_have_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "deep_kernels", DEFINITION.format(NAME, "deep_one"), monkeypatch)
    module(tmp_path, "shallow", "import deep_kernels\n", monkeypatch)
    with pytest.raises(ConformanceError, match=(
            r"module shallow defines no kernel: .*; the modules that it imports define some: --kernels deep_kernels$")):
        kernels(NAME, ["shallow"])


def test_two_modules_may_not_have_a_factory_make_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "factory_of_one_name", FACTORY, monkeypatch)
    for number in (1, 2):
        module(tmp_path, f"wants_one_name_{number}", 'from factory_of_one_name import make\nmade = make("one_name")\n',
               monkeypatch)
    assert [k.name for k in kernels(NAME, ["wants_one_name_1"])] == ["one_name"]
    with pytest.raises(ConformanceError, match=r"two kernels of moe_reduce_fused are called 'one_name': "
                       r"factory_of_one_name.make.<locals>.made \(in wants_one_name_1\) and "
                       r"factory_of_one_name.make.<locals>.made \(in wants_one_name_2\)"):
        kernels(NAME, ["wants_one_name_2"])


def test_a_kernel_that_a_function_registers_is_its_own_modules() -> None:
    @kernel(NAME, name="registered_at_run_time")
    def late(x, token_topk_to_pos, out):  # type: ignore[no-untyped-def]
        out.zero_()

    assert (late.home, late.module, late.modules) == ("", __name__, (__name__,))
