"""Around the body of a task, in the processes of a worker."""
