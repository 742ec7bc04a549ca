"""What two samples of scores say: held-out ID scores against wild or new ones. Nothing else of salcli is imported.

evidence: p-values, threshold, certificate, π̂, drift, false discoveries. stream: martingale. resampling: bootstrap.
All scores are outlier scores: higher = more OOD.
"""
