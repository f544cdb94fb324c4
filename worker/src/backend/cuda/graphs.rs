//! Recorded steps: for the common shapes all launches in one call.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::{Gpu, Stream};
use super::error::{CudaError, check};

/// Nodes that are looked at: a product has two or three.
const NODES_MAX: usize = 16;

/// An instantiated graph.
#[derive(Debug)]
pub(super) struct Graph {
    gpu: Arc<Gpu>,
    raw: sys::CUgraphExec,
}

// SAFETY: a graph may be launched from any thread, one at a time, as its owner does.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `enqueue` puts on the stream; nothing of it runs now.
    pub(super) fn record(
        stream: &Stream,
        enqueue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        let graph = capture(stream, enqueue)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph was just recorded; the instance outlives it by itself.
        let made = unsafe {
            let made = sys::cuGraphInstantiateWithFlags(&raw mut raw, graph, 0);
            sys::cuGraphDestroy(graph);
            made
        };
        check(made, || "cuGraphInstantiate".into())?;
        let graph = Self { gpu: stream.gpu().clone(), raw };
        // SAFETY: both live; what a first launch would do is done now.
        check(unsafe { sys::cuGraphUpload(graph.raw, stream.raw()) }, || "cuGraphUpload".into())?;
        Ok(graph)
    }

    /// Enqueues all of it.
    pub(super) fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live; the memory that the launches name is held by the backend that holds the graph.
        check(unsafe { sys::cuGraphLaunch(self.raw, stream.raw()) }, || "cuGraphLaunch".into())
    }
}

/// Whether any of what `enqueue` puts on the stream sets memory: a graph with such a node takes several times as long to launch. Nothing of it
/// runs.
pub(super) fn sets_memory(
    stream: &Stream,
    enqueue: impl FnOnce() -> Result<(), CudaError>,
) -> Result<bool, CudaError> {
    let graph = capture(stream, enqueue)?;
    let mut nodes = [std::ptr::null_mut(); NODES_MAX];
    let mut count = NODES_MAX;
    // SAFETY: the graph was just recorded, there is room for `count` nodes; both live until it is destroyed, once.
    unsafe {
        let found = sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count);
        let sets = nodes[..count.min(NODES_MAX)].iter().any(|node| {
            let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL;
            sys::cuGraphNodeGetType(*node, &raw mut kind) == sys::CUresult::CUDA_SUCCESS
                && kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET
        });
        sys::cuGraphDestroy(graph);
        check(found, || "cuGraphGetNodes".into()).map(|()| sets)
    }
}

fn capture(
    stream: &Stream,
    enqueue: impl FnOnce() -> Result<(), CudaError>,
) -> Result<sys::CUgraph, CudaError> {
    // cublasLt may load a kernel while it is asked to launch it, which stricter modes forbid.
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream lives; the capture is ended below in any case.
    check(unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) }, || "cuStreamBeginCapture".into())?;
    let enqueued = enqueue();
    let mut graph = std::ptr::null_mut();
    // SAFETY: as above; writes one handle, destroyed below.
    let ended = unsafe { sys::cuStreamEndCapture(stream.raw(), &raw mut graph) };
    enqueued?;
    check(ended, || "cuStreamEndCapture".into())?;
    Ok(graph)
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.can_free() {
            // SAFETY: made in `record`, destroyed once.
            unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}
