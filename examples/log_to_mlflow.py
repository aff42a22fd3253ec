"""Follow a run in MLflow; MLFLOW_TRACKING_URI names a server or a file such as sqlite:///runs.db.

Needs: pip install mlflow-skinny
Run, in this folder: fedglimpse run method=glimpse log.own=log_to_mlflow:MlflowSink --out runs/a
"""

from collections.abc import Mapping

from mlflow.tracking import MlflowClient

from fedglimpse.runs.trackers import Source

EXPERIMENT = "fedglimpse"


class MlflowSink:
    """One run of MLflow for each seed; resuming a run of fedglimpse resumes them."""

    def __init__(self, source: Source) -> None:
        self.client = MlflowClient()
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        experiment_id = (
            experiment.experiment_id if experiment else self.client.create_experiment(EXPERIMENT)
        )
        self.id = source.tracker_id(
            "mlflow",
            lambda: self.client.create_run(experiment_id, run_name=source.name).info.run_id,
        )
        self.client.update_run(self.id, status="RUNNING")
        if not source.done:
            for key, value in {**source.config.flat(), "seed": source.seed}.items():
                self.client.log_param(self.id, key, value)

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.client.log_metric(self.id, name, value, step=round_num)

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")
