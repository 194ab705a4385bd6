"""Secrets in recorded command lines are masked, and nothing else is."""

from __future__ import annotations

import base64
import json
import random
import shlex
import shutil
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddltrace.cli import cli
from ddltrace.dashboard.runs.run_request import read_request
from ddltrace.experiments.harness import results_file
from ddltrace.experiments.harness.results import Results
from ddltrace.experiments.harness.runner import resume_experiment
from ddltrace.experiments.harness.settings import Settings
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.masked_command import MASK, is_masked, masked_command
from ddltrace.tracer.trace.run_files import read_run_file, write_run

ROOT = Path(__file__).parents[3]

NAMES = [
    *("api-key", "api_key", "apikey", "apiKey", "token", "hf-token", "auth-token", "password"),
    *("passwd", "db-password", "secret", "client-secret", "auth", "access-key", "secret_key"),
    *("private-key", "credentials", "wandb.api_key", "passphrase"),
]
VARIABLES = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "MYSQL_PWD"]


@pytest.mark.parametrize("name", NAMES)
def test_values_of_named_options(name: str) -> None:
    for value in ("hunter2", "x", "1234", "a b c", "p@ss:w/rd", "ends=with="):
        for words in (
            ["train.py", f"--{name}", value, "--lr", "0.1"],
            ["train.py", f"--{name}={value}", "--lr", "0.1"],
            ["train.py", f"{name}={value}", "--lr", "0.1"],
            ["train.py", f"-{name}", value, "--lr", "0.1"],
        ):
            masked = masked_command(words)
            assert value not in " ".join(masked).replace(name, "") or value == "x", masked
            assert is_masked(masked)
            assert [word for word in masked if MASK not in word] == [
                word for word in words if value not in word or word == "train.py"
            ] or value == "x"


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_and_shells(name: str) -> None:
    assert masked_command(["env", f"{name}=hunter2", "python"])[1:] == [f"{name}={MASK}", "python"]
    script = f"export {name}='hunter 2' && python t.py --password hunter3 --lr 0.1"
    masked = masked_command(["bash", "-c", script])
    assert masked[2] == f"export {name}='{MASK}' && python t.py --password {MASK} --lr 0.1"
    assert masked_command(["docker", "-e", f"{name}=hunter2", "image"])[2] == f"{name}={MASK}"
    assert masked_command([f"--env={name}=hunter2"]) == [f"--env={name}={MASK}"]


def test_headers_and_json() -> None:
    for text in (
        "Authorization: Bearer hunter2",
        "X-Api-Key: hunter2",
        '{"lr": 0.1, "api_key": "hunter2"}',
        "https://host/path?lr=0.1&token=hunter2",
    ):
        masked = masked_command(["curl", text])[1]
        assert "hunter2" not in masked
        assert MASK in masked
    assert masked_command(['{"lr": 0.1, "api_key": "hunter2"}']) == [
        f'{{"lr": 0.1, "api_key": "{MASK}"}}'
    ]


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hunter2@host/path",
        "postgresql://user:hunter2@db:5432/runs",
        "redis://:hunter2@host",
        "https://hunter2hunter2hunter2hunter2@github.com/x/y",
        "https://user:p@hunter2@host/path",
        "user:hunter2@host",
        "--tracking-uri=https://user:hunter2@host/path",
    ],
)
def test_credentials_in_urls(url: str) -> None:
    masked = masked_command(["x.py", url, "--url", url])
    assert "hunter2" not in " ".join(masked)
    assert "user:" not in " ".join(masked)
    assert any(host in masked[1] for host in ("host", "db", "github.com"))


def keys() -> list[str]:
    chosen = random.Random(7)
    alphabet = string.ascii_letters + string.digits
    word = "".join(chosen.choices(alphabet, k=40))
    token = base64.urlsafe_b64encode(chosen.randbytes(30)).decode()
    return [
        *(f"{prefix}{word[:24]}" for prefix in ("sk-", "sk-proj-", "hf_", "ghp_", "gho_")),
        *("AKIAIOSFODNN7EXAMPLE", f"xoxb-{word[:20]}", f"glpat-{word[:20]}", f"nvapi-{word}"),
        f"github_pat_{word}",
        f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{word}",
        *(word, token, chosen.randbytes(20).hex(), chosen.randbytes(32).hex()),
        base64.b64encode(chosen.randbytes(33)).decode(),
    ]


@pytest.mark.parametrize("key", keys())
def test_words_that_look_like_keys(key: str) -> None:
    for words in ([key], ["--x", key], [f"--x={key}"], [f"t.py {key}"]):
        masked = masked_command(["t.py", *words])
        assert key[-8:] not in " ".join(masked), masked
        assert is_masked(masked)
        assert masked_command(masked) == masked


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node 8 --nnodes 2:4 --rdzv-endpoint=host:29500 train.py",
        "torchrun --rdzv-id 9b216aec-7830-4fc0-a7a3-7c4cd8e7481f --rdzv-backend c10d train.py",
        "python train.py --max-tokens 512 --num_tokens=1024 --tokenizer gpt2 --pad-token x",
        "python train.py --token-file /run/secrets/token --password-file pw.txt --key-dim 64",
        "python train.py --use-auth-token train.py --trust-remote-code --sort-key name",
        "python train.py --key lr --num-key-value-heads 8 --label-key text --monkey=banana",
        "python train.py --model meta-llama/Llama-2-70b-chat-hf --output-dir /data/exp/2024-01-02",
        "python train.py --revision 607a30d783dfa663caf39e06633721c8d4cfcd7e",
        "python train.py --run-name resnet50-imagenet1k-bs256-lr3e-4-warmup500-seed42-fp16",
        "python -m torch.distributed.run --nproc_per_node=2 train.py --config=conf/base.yaml",
        "python train.py /cache/snapshots/607a30d783dfa663caf39e06633721c8d4cfcd7e/model.bin",
        "python /home/user/miniconda3/envs/pytorch21cuda121py311/bin/train.py",
        "python train.py --pass 2 --author me --authors 3 --passes 4 --secretary you",
        "srun --ntasks=8 --cpus-per-task=4 --gres=gpu:8 python train.py",
        "python train.py dataset.path=s3://bucket/run?region=eu-west-1 ssh://git@github.com/x/y",
        "mpirun -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -H host1:4,host2:4 python train.py",
        "python train.py --ckpt epoch00012-step0000340000-val_loss0.4312.ckpt --sk-learn x",
        "python -c 'import torch; print(torch.__version__)' --password",
        "env PWD=/home/me TOKENIZERS_PARALLELISM=false python train.py --token $HF_TOKEN",
    ],
)
def test_ordinary_command_lines_stay(command: str) -> None:
    words = shlex.split(command)
    assert masked_command(words) == words


def test_random_names_of_runs_stay() -> None:
    chosen = random.Random(3)
    parts = [
        "bert",
        "base",
        "lr",
        "3e5",
        "bs",
        "64",
        "adamw",
        "cosine",
        "v2",
        "2024",
        "ddp",
        "fp16",
    ]
    for _ in range(300):
        name = chosen.choice("-_.").join(chosen.choices(parts, k=chosen.randint(2, 9)))
        assert masked_command(["--name", name]) == ["--name", name]


def test_long_words_are_masked_in_linear_time() -> None:
    for word in ("a" * 200_000, "a:" * 100_000, "--x " * 50_000, "=" * 100_000, "eyJ" * 60_000):
        masked_command([word])


JOB = [sys.executable, "-c", "pass", "--password", "hunter2", "--lr", "0.1"]


@pytest.mark.parametrize("keep", [False, True])
def test_the_record_of_a_run_has_no_secrets(tmp_path: Path, keep: bool) -> None:
    options = ["--keep-command"] if keep else []
    command = [sys.executable, "-m", "ddltrace", "run", "-o", str(tmp_path / "x"), *options]
    subprocess.run([*command, "--", *JOB], check=False, capture_output=True, cwd=tmp_path)
    recorded = read_run_file(tmp_path / "x").command
    assert recorded == (JOB if keep else [*JOB[:4], MASK, *JOB[5:]])
    found = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert found == ["run.json"]
    assert (b"hunter2" in (tmp_path / "x" / "run.json").read_bytes()) is keep


def test_commands_that_test_advice_say_what_is_missing(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "sample_traces" / "straggler", tmp_path / "trace")
    said = {}
    for command in (["torchrun", "t.py", "--token", MASK], ["torchrun", "t.py"]):
        run = read_run_file(tmp_path / "trace")
        run.command = command
        write_run(tmp_path / "trace", run)
        report = CliRunner().invoke(cli, ["analyze", str(tmp_path / "trace"), "--full"]).output
        assert "torchrun t.py" in " ".join(report.split())
        said[len(command)] = "secrets were not recorded" in " ".join(report.split())
    assert said == {4: True, 2: False}


def test_experiments_record_no_secrets_and_say_why_they_cannot_be_resumed(tmp_path: Path) -> None:
    settings = Settings(
        strategies=["unchanged", "ddp"],
        ranks=2,
        steps=20,
        warmup=5,
        also={"other": [*JOB, "x"]},
        command=JOB,
    )
    assert "hunter2" not in json.dumps(settings.recorded())
    assert not settings.is_masked
    kept = replace(settings, keep_command=True)
    assert kept.recorded()["command"] == JOB
    results_file.write(Results(settings=settings.recorded()), tmp_path)
    assert b"hunter2" not in (tmp_path / "results.json").read_bytes()
    with pytest.raises(UsageError, match="--keep-command"):
        resume_experiment(tmp_path)


def test_the_dashboard_does_not_start_a_masked_command() -> None:
    values = {"job": "trace:0", "strategies": "ddp", "steps": 20}
    with pytest.raises(UsageError, match="not recorded"):
        read_request(values, {0: masked_command(JOB)})
