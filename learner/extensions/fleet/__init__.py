"""The servers on other hosts: what they report, and the canary that a part of them serve first."""
