"""What two samples of scores say: held-out ID scores against wild or new ones. No other part of salcli is imported here.

evidence: p-values, threshold, certificate, π̂, drift, false discoveries. stream: martingale. resampling: bootstrap.
All scores are outlier scores: higher = more OOD.
"""
