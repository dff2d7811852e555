"""The Celery application. Celery reads the settings at first use, so the demo can set environment variables before."""

from celery import Celery

app = Celery(
    "example_project", include=["example_project.tasks", "example_project.recording", "example_project.run_log"]
)
app.config_from_object("example_project.settings")
