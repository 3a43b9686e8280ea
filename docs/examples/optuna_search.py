"""Search a learning rate with Optuna: bad trials are pruned, one program serves all."""

import optuna

from loopfeed import Callback, EvaluationRecord, TrainConfig, pack_demo, train

pack_demo("demo-data", num_images=500)
are_cached: list[bool] = []


class Prune(Callback):
    """Reports each evaluation to Optuna, which may end the run at its next step."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Report an evaluation, and prune."""
        self.trial.report(record.loss, record.step)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def objective(trial: optuna.Trial) -> float:
    """Train with the settings of a trial, and return the loss of its evaluation."""
    config = TrainConfig(
        data="demo-data",
        model="resnet8",
        batch=16,
        steps=16,
        eval_every_steps=4,
        run_dir=f"search/{trial.number}",
        overwrite=True,
        learning_rate=trial.suggest_float("learning_rate", 1e-5, 0.3, log=True),
        weight_decay=trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True),
    )
    result = train(config, callbacks=[Prune(trial)])
    are_cached.append(result.from_cache)
    return result.evaluations[-1].loss


sampler, pruner = optuna.samplers.TPESampler(seed=0), optuna.pruners.MedianPruner(2)
study = optuna.create_study(sampler=sampler, pruner=pruner)
study.optimize(objective, n_trials=6)
states = [trial.state.name for trial in study.trials]
print(states, study.best_params, study.best_value)
assert set(states) == {"COMPLETE", "PRUNED"}
assert all(are_cached[1:])
