"""The learner on a cluster: FSDP2 over Ray actors."""
