package liqo

// SliceClass is the class of the ResourceSlices that Spillway creates at the consumer
// and answers at the provider.
const SliceClass = "spillway"
