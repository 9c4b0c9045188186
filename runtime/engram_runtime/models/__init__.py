"""Model families: each file declares only how its family differs from the common decoder."""
