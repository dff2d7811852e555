"""The Celery application; its settings are read when first needed, so the demo can set the environment before."""

from celery import Celery

app = Celery("example_project", include=["example_project.tasks", "example_project.recording"])
app.config_from_object("example_project.settings")
