"""Log lines of Estimator programs, and the account of redone steps."""

from __future__ import annotations

from mayfly_train.progress import Progress, Redone, account, after_line, after_lines

LOG = """\
INFO:tensorflow:Graph was finalized.
INFO:tensorflow:Running local_init_op.
INFO:tensorflow:Saving checkpoints for 0 into hdfs://10.0.0.1:9000/mayfly/r/model/model.ckpt.
INFO:tensorflow:loss = 2.8191197, step = 0
INFO:tensorflow:global_step/sec: 10.632
INFO:tensorflow:loss = 1.3013477, step = 38 (3.581 sec)
I1128 12:00:07.000000 1403 basic_session_run_hooks.py:708] global_step/sec: 19.5
INFO:tensorflow:Saving checkpoints for 541 into /m/model.ckpt.
""".splitlines()


def test_a_trainers_log():
    progress = after_lines(Progress(), LOG)
    assert progress == Progress(step=541, loss=1.3013477, steps_per_second=19.5)


def test_an_evaluators_log():
    lines = [
        "INFO:tensorflow:Restoring parameters from hdfs://h:9000/mayfly/r-1/model/model.ckpt-541",
        "INFO:tensorflow:Saving dict for global step 541: accuracy = 0.79, global_step = 541, "
        "loss = 0.6",
        "INFO:tensorflow:Restoring parameters from /m/model.ckpt-1401",
        "INFO:tensorflow:Saving dict for global step 1401: accuracy = 0.9045, "
        "global_step = 1401, loss = 3.1e-01",
    ]
    progress = after_lines(Progress(), lines)
    assert (progress.accuracy, progress.evaluated_step) == (0.9045, 1401)
    assert (progress.restores, progress.restored_step) == (2, 1401)


def test_the_last_loss_does_not_take_back_the_last_checkpoints_step():
    """The chief's checkpoint is saved before its loss is told, which has the step before it."""
    lines = ["Saving checkpoints for 200 into /m/model.ckpt.", "loss = 0.5, step = 199 (0.4 sec)"]
    assert after_lines(Progress(step=195), lines) == Progress(step=200, loss=0.5)


def test_a_start_without_a_checkpoint_begins_at_zero():
    """A chief that died before its first checkpoint restores none, and saves step 0 at once."""
    lines = ["Saving checkpoints for 0 into /m/model.ckpt.", "loss = 2.1, step = 0"]
    assert after_lines(Progress(step=30), lines).step == 0


def test_other_lines_change_nothing():
    before = Progress(step=7, loss=0.1)
    for line in ("", "loss", "step = 9", "global_step/sec:", "\x00\xff", "loss = x, step = y"):
        assert after_line(before, line) == before


def test_a_loss_that_is_no_number_is_read():
    assert str(after_line(Progress(), "loss = nan, step = 5").loss) == "nan"


def test_an_evaluation_without_accuracy_keeps_the_last():
    line = "Saving dict for global step 9: global_step = 9, loss = 0.5"
    progress = after_line(Progress(accuracy=0.5), line)
    assert (progress.accuracy, progress.evaluated_step) == (0.5, 9)


def test_no_step_is_redone_without_a_restore():
    redone = Redone()
    for step in (0, 100, 200):
        redone = account(redone, Progress(step=step), [step + 30])
    assert redone == Redone(steps=0, reached=200, restores=0)


def test_a_restore_loses_what_any_trainer_had_reached():
    redone = account(Redone(), Progress(step=300), [280])
    # The chief is dead, its worker went on to 500; the new chief restores 200 and is at 220.
    redone = account(redone, Progress(step=220, restores=1, restored_step=200), [500])
    assert redone == Redone(steps=300, reached=220, restores=1)
    # The worker's last word is still from before: it does not count again.
    redone = account(redone, Progress(step=240, restores=1, restored_step=200), [500])
    assert redone == Redone(steps=300, reached=240, restores=1)


def test_two_restores_add_up():
    redone = account(Redone(), Progress(step=100), [])
    redone = account(redone, Progress(step=60, restores=1, restored_step=60), [])
    redone = account(redone, Progress(step=90, restores=1, restored_step=60), [])
    redone = account(redone, Progress(step=80, restores=2, restored_step=80), [])
    assert redone.steps == 40 + 10


def test_a_run_that_is_taken_up_from_a_checkpoint_has_lost_nothing():
    assert account(Redone(), Progress(step=700, restores=1, restored_step=700), []).steps == 0


def test_a_first_start_from_step_0_has_lost_nothing_though_others_are_ahead():
    begun = Progress(step=100, restores=1, restored_step=0)
    redone = account(Redone(), begun, [100], first_start=True)
    assert redone == Redone(steps=0, reached=100, restores=1)
    # Its second start is another matter, and so is a step that was told before.
    assert account(redone, Progress(step=0, restores=2, restored_step=0), [120]).steps == 120
    assert account(Redone(), begun, [100]).steps == 100


def test_a_program_of_any_engine_tells_in_our_own_form():
    lines = [
        "progress: restored_step=937",
        "[rank0] progress: step=1000 loss=0.3303 steps_per_second=63.83",
        "progress: step=soon loss=nan other=1",
        "progress: evaluated_step=1000 accuracy=0.8561",
        "progress without facts",
    ]
    progress = after_lines(Progress(), lines)
    assert progress.step == progress.evaluated_step == 1000
    assert (progress.steps_per_second, progress.accuracy) == (63.83, 0.8561)
    assert (progress.restores, progress.restored_step) == (1, 937)
    assert progress.loss != progress.loss  # nan: it was told so
