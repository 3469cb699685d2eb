"""From switches to patches and back, on a small fork of Megatron."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

import mindspeed_dsa
from mindspeed_dsa import (
    Conflict,
    Feature,
    Flag,
    Patch,
    PatchError,
    Requires,
    SettingsError,
    log,
    session,
)
from mindspeed_dsa.patches import versions
from tests.support import fork


@pytest.fixture
def megatron(tmp_path, monkeypatch):
    with fork.features_in(tmp_path, monkeypatch) as register:
        yield register


def calls():
    return sys.modules["corp_megatron_impl"].CALLS


@pytest.mark.parametrize("imported_first", [True, False])
def test_enable_reaches_the_consumer_in_both_import_orders(megatron, imported_first):
    megatron()
    if imported_first:
        pass
    mindspeed_dsa.enable(use_counting=True)
    import corp_megatron.core.consumer as consumer

    assert consumer.use(3) == 6
    assert calls() == [(3,)]
    mindspeed_dsa.disable()
    assert consumer.use(3) == 6
    assert calls() == [(3,)], "a call after disable() still went through the patch"
    assert consumer.rescale is sys.modules["corp_megatron.core.layers"].scale


@pytest.mark.parametrize(
    ("version", "warned"), [("2.5.1", True), ("2.13.0+cpu", False), ("99.0.0", True), (None, False)]
)
def test_a_torch_that_was_not_tried_is_warned_of_once(megatron, monkeypatch, version, warned):
    known = versions.of_package
    monkeypatch.setattr(versions, "of_package", lambda name: version if name == "torch" else known(name))
    said = []
    monkeypatch.setattr(log.get().logger, "callHandlers", lambda record: said.append(record.getMessage()))
    log.forget()
    megatron()
    mindspeed_dsa.enable(use_counting=True)
    mindspeed_dsa.enable(use_counting=True)
    found = [text for text in said if text.startswith(f"torch {version} was not tried")]
    assert len(found) == warned


def test_nothing_on_patches_nothing(megatron):
    megatron()
    mindspeed_dsa.enable()
    assert mindspeed_dsa.report() == []


def test_enabled_restores_what_was_before(megatron):
    megatron()
    megatron("tens", "tenfold", "replace")
    import corp_megatron.core.consumer as consumer

    mindspeed_dsa.enable(use_counting=True)
    with mindspeed_dsa.enabled(use_tens=True):
        assert consumer.use(3) == 30
        assert len(calls()) == 1, "the wrapper goes around the replacement"
    assert consumer.use(3) == 6
    assert len(calls()) == 2
    assert session.current().settings.use_tens is False


def test_a_refused_enable_leaves_the_running_session_alone(megatron):
    megatron()
    megatron("tens", "missing", "replace")
    import corp_megatron.core.consumer as consumer

    mindspeed_dsa.enable(use_counting=True)
    with pytest.raises(SettingsError, match="did you mean use_counting"):
        mindspeed_dsa.enable(use_countin=True)
    with pytest.raises(PatchError, match="missing"):
        mindspeed_dsa.enable(use_tens=True)
    assert consumer.use(3) == 6
    assert len(calls()) == 1, "counting was on before and must be on still"


def test_two_replacements_name_both_features(megatron):
    megatron("tens", "tenfold", "replace")
    megatron("tens-too", "count", "replace")
    with pytest.raises(PatchError) as caught:
        mindspeed_dsa.enable(use_tens=True, use_tens_too=True)
    assert "both tens " in str(caught.value)
    assert "tens-too" in str(caught.value)


def test_requirements_and_conflicts_are_told_at_once(megatron):
    megatron(
        "needy",
        requires=Requires(
            versions={"megatron-core": ">=0.17", "no-such-distribution": ">=1"},
            packages={"no_such_package": "pip install no-such-package"},
            features=("counting",),
            platforms=("npu",),
        ),
        conflicts=(Conflict("tens", "they disagree; choose one"),),
    )
    megatron("tens", "tenfold", "replace")
    megatron()
    with pytest.raises(SettingsError) as caught:
        mindspeed_dsa.enable(use_needy=True, use_tens=True)
    for words in (
        "needs megatron-core >=0.17, but 0.16.1 is installed",
        "no-such-distribution",
        "pip install no-such-package",
        "needs the feature counting",
        "runs on npu, but this is platform",
        "cannot be combined with tens: they disagree; choose one",
        "API (use_needy=True)",
    ):
        assert words in str(caught.value)


def test_the_forks_own_parser_gets_flags_and_checks(megatron, monkeypatch, tmp_path, capsys):
    megatron(
        flags=(Flag("--use-counting", "count them"), Flag("--count-to", "limit", kind="value", type=int)),
        check=lambda args, options: [f"{args.derived} is odd; use another"] if args.num_layers == 7 else [],
    )
    argv = ["--num-layers", "4", "--use-counting", "--count-to", "5"]
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    monkeypatch.setenv("MINDSPEED_DSA_COUNT_TO", "9")
    session.enable_from_argv(argv)
    from corp_megatron.training.initialize import initialize

    args = initialize()
    assert (args.use_counting, args.num_layers) == (True, 4)
    assert args.count_to == 9, "the environment outranks the command line"

    monkeypatch.setattr(sys, "argv", ["train.py", "--num-layers", "7", "--use-counting"])
    with pytest.raises(SettingsError, match="counting: 14 is odd; use another"):
        initialize()

    monkeypatch.setattr(sys, "argv", ["train.py", "--use-countng"])
    with pytest.raises(SystemExit) as exit_status:
        initialize()
    assert exit_status.value.code == 2
    assert "--use-countng: did you mean --use-counting?" in capsys.readouterr().err

    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit):
        initialize()
    assert "count them" in capsys.readouterr().out


def test_a_job_may_enable_features_while_its_parser_runs(megatron, monkeypatch):
    """The namespace then has the values of the new session, Megatron's own flags included."""
    megatron(
        flags=(
            Flag("--use-counting", "switch"),
            Flag("--num-layers", "Megatron's", kind="value", type=int, megatron=True),
        )
    )
    argv = ["--use-counting"]
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    session.enable_from_argv(argv)
    from corp_megatron.training.initialize import initialize

    def provider(parser):
        mindspeed_dsa.enable(num_layers=6, mindspeed_report_dir="here")
        return parser

    args = initialize(provider)
    assert (args.num_layers, args.mindspeed_report_dir) == (6, "here")


def test_help_shows_the_flags_with_everything_off(megatron, monkeypatch, capsys):
    megatron()
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    session.enable_from_argv(["--help"])
    from corp_megatron.training.initialize import initialize

    with pytest.raises(SystemExit):
        initialize()
    assert "--use-counting" in capsys.readouterr().out


def test_the_first_model_verifies_and_reports(megatron, tmp_path, capsys):
    megatron()
    mindspeed_dsa.enable(use_counting=True, mindspeed_report_dir=str(tmp_path / "logs"))
    import corp_megatron.core.layers  # noqa: F401 - fires the hook
    from corp_megatron.core.models.common.language_module.language_module import LanguageModule

    assert LanguageModule("config").config == "config"
    LanguageModule("again")
    printed = capsys.readouterr().err
    assert printed.count("API (use_counting=True)") == 1, "the table is printed once"
    record = json.loads((tmp_path / "logs" / "mindspeed_dsa.json").read_text())
    states = {site["target"]: site["state"] for site in record["sites"]}
    assert states["corp_megatron.core.layers:scale"] == "applied"


def test_a_stale_reference_stops_the_first_model(megatron):
    megatron()
    import corp_megatron.core.layers as layers
    from corp_megatron.core.models.common.language_module.language_module import LanguageModule

    def holder(function=layers.scale):
        return function(1)

    mindspeed_dsa.enable(use_counting=True)
    with pytest.raises(PatchError, match=r"default argument of .*holder"):
        LanguageModule()
    assert layers.scale is holder.__defaults__[0], "everything was undone"
    with pytest.raises(PatchError, match=r"holder"):
        LanguageModule()  # a retry must not build its model on stock Megatron
    mindspeed_dsa.disable()
    assert LanguageModule("config").config == "config"


def test_a_record_that_cannot_be_written_does_not_stop_the_run(megatron, tmp_path, capsys):
    megatron()
    (tmp_path / "file").touch()
    mindspeed_dsa.enable(use_counting=True, mindspeed_report_dir=str(tmp_path / "file" / "logs"))
    mindspeed_dsa.finalize()
    assert "mindspeed_dsa.json cannot be written" in capsys.readouterr().err


def test_a_nearly_right_flag_is_told_of(megatron, capsys):
    megatron()
    session.enable_from_argv(["--use-countin"])
    assert "did you mean --use-counting?" in capsys.readouterr().err


def test_a_name_is_taken_once(megatron):
    megatron()
    with pytest.raises(SettingsError, match="exists already"):
        megatron()


def test_a_switch_that_only_the_jobs_parser_has_heard_of_is_refused():
    with mindspeed_dsa.enabled(experimental_attention_variant="dsa"):
        heard = SimpleNamespace(experimental_attention_variant="dsa", use_fused_dsa=True)
        with pytest.raises(mindspeed_dsa.SettingsError, match=r"mindspeed_dsa.enable\(use_fused_dsa=True\)"):
            mindspeed_dsa.validate(heard)
        mindspeed_dsa.validate(SimpleNamespace(experimental_attention_variant="dsa", use_fused_dsa=False))
    with mindspeed_dsa.enabled(experimental_attention_variant="dsa", use_fused_dsa=True):
        mindspeed_dsa.validate(heard)


def test_a_flag_of_features_that_are_off_is_named(monkeypatch):
    said = []
    monkeypatch.setattr(log.get().logger, "callHandlers", lambda record: said.append(record.getMessage()))
    log.forget()
    wanted = {"save_hf_interval": 500, "two_streams_min_tokens": 0, "dsa_backend": "cpu"}
    with mindspeed_dsa.enabled(use_fused_dsa=True, **wanted):
        mindspeed_dsa.validate(SimpleNamespace(use_fused_dsa=True, **wanted))
    assert sorted(text for text in said if "has no effect" in text) == [
        "--save-hf-interval has no effect without save-hf, which is off in this job",
        "--two-streams-min-tokens has no effect without two-streams, which is off in this job",
    ]


@pytest.fixture
def unnamed(megatron, tmp_path, monkeypatch):
    """Register a feature on a fork that no setting names, with no other Megatron imported."""
    monkeypatch.delenv("MINDSPEED_DSA_MEGATRON_ROOT")
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    # The target is in stock Megatron, too: switches are checked against it while no other is imported.
    file = tmp_path / "corp_megatron" / "core" / "utils.py"
    file.write_text("def divide(numerator, denominator):\n    return numerator // denominator\n")
    patch = Patch("megatron.core.utils:divide", "wrap", "corp_megatron_impl:count", "test")
    mindspeed_dsa.register(
        Feature("dividing", "a test feature", flags=(Flag("--use-dividing", "switch"),), patches=(patch,))
    )
    yield
    mindspeed_dsa.unregister("dividing")


@pytest.mark.parametrize("imported_first", [True, False])
def test_a_fork_is_known_by_its_import(unnamed, imported_first):
    if imported_first:
        import corp_megatron.core.utils as utils
    mindspeed_dsa.enable(use_dividing=True)
    import corp_megatron.core.utils as utils

    assert utils.divide(6, 3) == 2
    assert calls() == [(6, 3)]
    root = session.current().settings.setting("megatron_root")
    assert (root.value, root.who) == ("corp_megatron", "imports (corp_megatron.core)")
    mindspeed_dsa.disable()
    mindspeed_dsa.enable()
    assert session.current().settings.megatron_root == "corp_megatron", "it still is what the job imports"


def test_a_fork_beside_stock_megatron_is_left_alone(unnamed, monkeypatch):
    mindspeed_dsa.enable(use_dividing=True)
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace())
    mindspeed_dsa.enable(use_dividing=True)
    import corp_megatron.core.utils as utils

    assert utils.divide(6, 3) == 2
    assert session.current().settings.megatron_root == "megatron"
    implementation = sys.modules.get("corp_megatron_impl")
    assert implementation is None or implementation.CALLS == []


def test_without_any_megatron_the_message_names_the_forks_flag(megatron, monkeypatch):
    monkeypatch.setenv("MINDSPEED_DSA_MEGATRON_ROOT", "no_megatron")
    megatron(requires=Requires(versions={"megatron-core": ">=0.12.1"}))
    with pytest.raises(SettingsError, match="or name your fork's package with --megatron-root"):
        mindspeed_dsa.enable(use_counting=True)


LAYERS = Flag("--num-layers", "Megatron's", kind="value", type=int, megatron=True)
UNREAD = Flag("--num-heads", "Megatron's, in another release", kind="value", type=int, megatron=True)


def test_a_variable_for_megatrons_flag_is_heard_with_everything_off(megatron, monkeypatch):
    megatron(flags=(Flag("--use-counting", "switch"), LAYERS))
    monkeypatch.setenv("MINDSPEED_DSA_NUM_LAYERS", "6")
    monkeypatch.setattr(sys, "argv", ["train.py", "--num-layers", "4"])
    session.enable_from_argv(sys.argv[1:])
    from corp_megatron.training.initialize import initialize

    assert initialize().num_layers == 6


def test_a_variable_for_a_flag_that_megatron_lacks_is_refused(megatron, monkeypatch):
    megatron(flags=(Flag("--use-counting", "switch"), UNREAD))
    monkeypatch.setenv("MINDSPEED_DSA_NUM_HEADS", "6")
    monkeypatch.setattr(sys, "argv", ["train.py", "--num-layers", "4", "--use-counting"])
    session.enable_from_argv(sys.argv[1:])
    from corp_megatron.training.initialize import initialize

    with pytest.raises(SettingsError, match="--num-heads, which this job does not read; unset MINDSPEED_"):
        initialize()


def test_a_variable_that_nobody_passes_on_stops_the_first_model(megatron, monkeypatch):
    megatron(flags=(Flag("--use-counting", "switch"), LAYERS))
    monkeypatch.setenv("MINDSPEED_DSA_NUM_LAYERS", "6")
    mindspeed_dsa.enable(use_counting=True)
    from corp_megatron.core.models.common.language_module.language_module import LanguageModule

    for _ in range(2):
        with pytest.raises(SettingsError, match="NUM_LAYERS=6 is for Megatron's own --num-layers, and"):
            LanguageModule("config")
    args = SimpleNamespace(use_counting=True, num_layers=4)
    with pytest.raises(SettingsError, match=r"unset MINDSPEED_DSA_NUM_LAYERS, or omit --num-layers"):
        mindspeed_dsa.validate(args)
    mindspeed_dsa.apply_environment(args)
    assert args.num_layers == 6
    mindspeed_dsa.validate(args)
    assert LanguageModule("config").config == "config"


def test_a_feature_that_another_needs_may_follow_from_code(megatron):
    megatron("needy", requires=Requires(features=("counting",)))
    megatron()
    session.enable_from_argv(["--use-needy"])
    for refuse in (lambda: mindspeed_dsa.validate(SimpleNamespace()), mindspeed_dsa.finalize):
        with pytest.raises(SettingsError, match="the feature counting, which is off; add --use-counting"):
            refuse()
    mindspeed_dsa.enable(use_counting=True)
    mindspeed_dsa.validate(SimpleNamespace())
    mindspeed_dsa.finalize()


@pytest.mark.parametrize("error", [SettingsError("no"), PatchError(["no"]), PatchError(["no", "never"])])
def test_megatron_adds_no_modules_to_our_errors(error):
    again = type(error)(f"{error} when instantiating MoELayer when instantiating TransformerLayer")
    assert str(again) == str(error)
