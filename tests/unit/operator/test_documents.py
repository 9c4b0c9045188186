"""Files to resources: where a problem is, which policy serves a model, what YAML may not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram_operator.errors import ResourceError
from engram_operator.resources import load_files, select_policy
from tests.unit.operator.documents import SCHEMAS, model, policy

MODEL = "apiVersion: engram.dev/v1alpha1\nkind: EngramModel\nmetadata: {name: NAME}\nspec: {model: {uri: 'hf://a/b'}}\n"
POLICY = (
    "apiVersion: engram.dev/v1alpha1\nkind: SnapshotPolicy\nmetadata: {name: NAME}\nspec: {storage: {uri: 'pvc://c'}}\n"
)
EXAMPLES = Path(__file__).parents[3] / "examples"


def load(tmp_path: Path, *texts: str) -> tuple[list[str], list[str]]:
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"{number}.yaml")
        paths[-1].write_text(text)
    resources = load_files(paths, SCHEMAS)
    return [model.key for model in resources.models], [policy.name for policy in resources.policies]


def problems(tmp_path: Path, *texts: str) -> list[str]:
    with pytest.raises(ResourceError) as caught:
        load(tmp_path, *texts)
    return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_documents_of_several_files_keep_their_order(tmp_path: Path) -> None:
    texts = (
        "---\n" + MODEL.replace("NAME", "b") + "---\n" + POLICY.replace("NAME", "default"),
        MODEL.replace("NAME", "a"),
    )
    assert load(tmp_path, *texts) == (["default/b", "default/a"], ["default"])


def test_the_example_is_valid() -> None:
    resources = load_files([EXAMPLES / "quickstart.yaml"], SCHEMAS)
    (found,) = resources.models
    assert (found.name, found.uri.scheme, found.accelerator.resource_name) == ("smollm", "file", "")
    chosen = select_policy(found, resources.policies)
    assert chosen is not None
    assert chosen.storage.uri.scheme == "file"


def test_problems_name_file_and_document_and_come_together(tmp_path: Path) -> None:
    bad = MODEL.replace("NAME", "m").replace("{model:", "{replicas: -1, model:")
    nameless = MODEL.replace("{name: NAME}", "{}")
    assert problems(tmp_path, bad + "---\n" + nameless, "kind: Pod\n") == [
        '0.yaml: EngramModel "m": spec.replicas: must be >= 0, got -1',
        "0.yaml: document 2: metadata.name: required",
        '1.yaml: document 1: kind: must be one of EngramModel, Snapshot, SnapshotPolicy, got "Pod"',
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0.yaml: holds no document"),
        ("- 1\n", "0.yaml: document 1: must be an object with apiVersion and kind"),
        ("a: [1\n", "0.yaml: line 2, column 1: expected ',' or ']'"),
        ("a: 1\nb: 2\na: 3\n", "0.yaml: line 3, column 1: the key 'a' is given twice"),
        (
            "a: !!python/object/apply:os.system ['true']\n",
            "0.yaml: line 1, column 4: could not determine a constructor",
        ),
        (POLICY.replace("NAME", "p"), "0.yaml: no EngramModel in it"),
        (MODEL.replace("NAME", "m") * 1 + "---\n" + MODEL.replace("NAME", "m"), "declared twice in namespace default"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in "\n".join(problems(tmp_path, text))


def test_a_missing_file_and_a_binary_one(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ResourceError, match=r"nowhere: No such file.*\n.*binary: is not UTF-8"):
        load_files([tmp_path / "nowhere", tmp_path / "binary"], SCHEMAS)


def test_a_snapshot_document_is_refused_with_the_reason(tmp_path: Path) -> None:
    snapshot = "apiVersion: engram.dev/v1alpha1\nkind: Snapshot\nmetadata: {name: s}\nspec:\n  modelRef: {name: m}\n"
    snapshot += "  source: {conversation: {id: c}}\n"
    (message,) = problems(tmp_path, MODEL.replace("NAME", "m") + "---\n" + snapshot)
    assert message.startswith('0.yaml: Snapshot "s": kind: is made by a cluster')


def test_a_named_policy_must_exist(tmp_path: Path) -> None:
    text = MODEL.replace("NAME", "m").replace("{model:", "{snapshots: {policyRef: {name: gold}}, model:")
    assert problems(tmp_path, text + "---\n" + POLICY.replace("NAME", "silver")) == [
        '0.yaml: EngramModel "m": spec.snapshots.policyRef.name: no SnapshotPolicy "gold" in namespace default;'
        " there is: silver"
    ]


def test_which_policy_serves_a_model() -> None:
    default, gold = policy(), policy(name="gold")
    named = model(snapshots={"policyRef": {"name": "gold"}})
    assert select_policy(model(), [gold, default]) is default
    assert select_policy(named, [gold, default]) is gold
    assert select_policy(model(), [gold]) is None
    assert select_policy(model(), []) is None


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("hf://repo", "spec.model.uri: must be hf://ORG/REPO without '..', got 'hf://repo'"),
        ("hf://a/b/c", "must be hf://ORG/REPO"),
        ("hf://a/..", "must be hf://ORG/REPO"),
        ("s3://bucket", "must be s3://BUCKET/PREFIX"),
        ("pvc://Claim", "must be pvc://CLAIM or pvc://CLAIM/PATH"),
        ("pvc://claim/../etc", "must be pvc://CLAIM or pvc://CLAIM/PATH without '..'"),
        ("file://models/m", "must be file:///ABSOLUTE/PATH"),
        ("file:///", "must be file:///ABSOLUTE/PATH"),
        ("file:///a/../b", "must be file:///ABSOLUTE/PATH without '..'"),
    ],
)
def test_model_uris_that_no_schema_can_refuse(uri: str, message: str) -> None:
    with pytest.raises(ResourceError) as caught:
        model(uri)
    assert message in str(caught.value)


def test_other_problems_that_no_schema_can_say() -> None:
    with pytest.raises(ResourceError) as caught:
        model("pvc://c", model={"revision": "main", "name": "--help"}, cache={"size": "many"}, snapshots={"disk": -1})
    assert caught.value.problems == (
        "spec.model.revision: only hf:// has revisions",
        "spec.model.name: must not begin with '-'",
        "spec.cache.size: must be a quantity such as 4Gi, 500M or 1000000, got 'many'",
        "spec.snapshots.disk: must be >= 0, got -1",
    )
    with pytest.raises(ResourceError, match=r"spec\.storage\.uri: must not hold '\.\.'"):
        policy("pvc://c/../d")
