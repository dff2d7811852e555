"""A Django app that checks settings and options: put `celery_singleton_lock.contrib.django` into `INSTALLED_APPS`."""
