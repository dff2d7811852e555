"""Keeps leases alive while their work goes on."""
