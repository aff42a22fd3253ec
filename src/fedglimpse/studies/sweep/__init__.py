"""Sweeps: settings x variants x seeds, played in packs, stored cell by cell.

file (kinds and names in it) · plan (its cells) · runner (from file to folder) · folder (what is on
disk) · packs (who plays together) · stop (budget and signals) · progress · local, cluster, parcel
(where it is computed) · failures · reuse (cells of other sweeps)
"""
