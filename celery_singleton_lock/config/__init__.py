"""Options of tasks and settings of apps."""
