"""Many ranks and hosts as one trainer."""
