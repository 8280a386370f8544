"""Adapters for trainers. Importing this package imports none of them, and no framework.

Each module adapts one framework through its public hooks: `odb.integrations.ddp`, `.fsdp2`,
`.mesh`, and others. `.progress` and `.schedule` serve every training loop. docs/TRAINERS.md has the
contract that they keep.
"""
