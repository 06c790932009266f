"""What clients and servers compute with: tasks, batches, training loops, means, server optimisers."""
