"""The gate job leaves behind neither answers of users nor its process."""

import subprocess
import sys
from pathlib import Path

from onlinerl.deploy.gates.spec import GateSpec, HeldOutAnswer, Measurements, Reference
from tests.process_identity import start_time
from tests.waiting import until


def test_the_spec_is_gone_when_the_job_has_read_it_and_only_numbers_stay(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    answer = HeldOutAnswer(
        prompt_token_ids=[301, 302, 303],
        completion_token_ids=[304, 305],
        logprobs=[-1.0, -2.0],
        temperature=1.0,
        reward=1.0,
    )
    spec = GateSpec(
        candidate=tiny_model_dir,
        champion=tiny_model_dir,
        base=None,
        answers=[answer],
        reference=Reference(text="It was a dark night. " * 20, max_tokens=64, window=64),
        num_probes=2,
        probe_tokens=16,
        threads=1,
    )
    spec_file, out_file = tmp_path / "of.spec", tmp_path / "of.json"
    spec_file.write_text(spec.model_dump_json())

    # In a process of its own, because the job lowers the priority of its process.
    command = [sys.executable, "-m", "onlinerl.deploy.gates.job", str(spec_file), str(out_file)]
    subprocess.run(command, check=True, timeout=240)

    measurements = Measurements.model_validate_json(out_file.read_bytes())
    assert [file.name for file in tmp_path.iterdir()] == ["of.json"]
    assert measurements.num_tokens == 2
    assert not {301, 302, 303, 304, 305} & {
        i for probe in measurements.probes for i in probe.token_ids
    }


def test_a_job_does_not_outlive_a_controller_that_is_killed(tmp_path: Path) -> None:
    # The job waits for ever at a spec that is a pipe without a writer.
    controller = (
        "import os, sys, time; from pathlib import Path; "
        "from onlinerl.deploy.gates.examiner import ChildJob; "
        f"folder = Path({str(tmp_path)!r}); os.mkfifo(folder / 'of.spec'); "
        "job = ChildJob(folder / 'of.spec', folder / 'of.json', timeout_s=600); "
        "print(job._child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", controller], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        job = int(process.stdout.readline())
        assert start_time(job) is not None
        process.kill()

    until(lambda: start_time(job) is None, what="the job ended")
