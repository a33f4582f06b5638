"""What an application sends to a collector: a spool on its disk, batches, and the thread that sends them."""
