"""The Slurm cluster of slurm_node.py leaves no process behind, whatever runs in it."""

import psutil

from tests.launch.slurm_node import needs_slurm, processes_of, slurm_nodes, wait_until

STUBBORN = "trap '' TERM INT HUP; touch started; sleep 300; sleep 300"


@needs_slurm
def test_no_process_is_left(tmp_path):
    with slurm_nodes() as slurm:
        assert slurm.run("sbatch", f"--wrap={STUBBORN}", cwd=tmp_path).code == 0
        wait_until((tmp_path / "started").exists, "the job's start", slurm)
        running = processes_of(slurm)
        commands = [" ".join(process.cmdline()) for process in running]
    for expected in ("munged", "slurmctld -D", "slurmd -D", "slurmstepd: [1.batch]", "slurm_script"):
        assert any(expected in command for command in commands), commands
    # A step that has ended stays a zombie until its parent waits for it; the parent may never do so.
    left = [process for process in running if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left
    assert not slurm.folder.exists()
