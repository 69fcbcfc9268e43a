"""The Heat system: one job as one OpenStack template that needs nothing of Mayfly afterwards."""
