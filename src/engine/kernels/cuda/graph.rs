//! CUDA graphs: kernel launches that the host captures once and replays with a single call.
//!
//! A graph stores the addresses its kernels read and write. Whoever replays it must ensure that nothing else uses that
//! memory. Allocation is arithmetic on the host (`memory::heap`) and never part of a graph.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

thread_local! {
    /// The reason why the capture on this thread cannot be replayed; the outer `None` means no capture is active.
    static CAPTURE: RefCell<Option<Option<&'static str>>> = const { RefCell::new(None) };
}

/// Marks the active capture, if any, as not capturable. Call it wherever the launches depend on more than the contents
/// of tensors: a replay would not do what the next pass needs.
pub fn not_capturable(reason: &'static str) {
    CAPTURE.with_borrow_mut(|capture| capture.iter_mut().for_each(|found| *found = Some(reason)));
}

/// An instantiated CUDA graph.
pub struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    stream: Arc<CudaStream>,
    /// Number of kernel nodes.
    pub launches: usize,
}

impl Graph {
    /// Captures what `launch` enqueues, without running it, and returns the graph with `launch`'s result. If the work
    /// cannot be captured or replayed, returns the reason instead; the caller can still run the work without a graph.
    pub fn capture<R, E: std::fmt::Display>(
        device: &CudaDevice,
        launch: impl FnOnce() -> std::result::Result<R, E>,
    ) -> Result<std::result::Result<(Self, R), String>> {
        let stream = device.cuda_stream();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).w()?;
        CAPTURE.set(Some(None));
        let outcome = launch();
        let reason = CAPTURE.take().flatten();
        // SAFETY: the capture began on this stream.
        let graph = unsafe { result::stream::end_capture(stream.cu_stream()) };
        let recorded = stream.context().check_err();
        let failed = match (reason, &outcome, recorded, graph) {
            (Some(reason), _, _, graph) => {
                drop(graph.map(|graph| Self::new(graph, &stream)));
                reason.to_owned()
            }
            (None, Err(error), _, graph) => {
                drop(graph.map(|graph| Self::new(graph, &stream)));
                format!("the capture failed: {error}")
            }
            (None, Ok(_), Err(error), _) | (None, Ok(_), Ok(()), Err(error)) => {
                format!("the driver refused the capture: {error}")
            }
            (None, Ok(_), Ok(()), Ok(graph)) => match Self::new(graph, &stream).instantiate() {
                Ok(graph) => {
                    return Ok(outcome.map(|made| (graph, made)).map_err(|error| error.to_string()));
                }
                Err(reason) => reason,
            },
        };
        // The failed capture leaves an error in the context. Clear it, so that no later call reports it.
        drop(outcome);
        let _ = stream.context().check_err();
        Ok(Err(failed))
    }

    fn new(graph: sys::CUgraph, stream: &Arc<CudaStream>) -> Self {
        Self { graph, exec: std::ptr::null_mut(), stream: stream.clone(), launches: 0 }
    }

    /// Instantiates and uploads the graph; an error explains why it cannot be replayed.
    fn instantiate(mut self) -> std::result::Result<Self, String> {
        if self.graph.is_null() {
            return Err("nothing was captured".into());
        }
        // SAFETY: `self` owns the graph, and nothing that it launches is in flight.
        unsafe {
            self.launches = graph_to_kernels_only(self.graph);
            if self.launches == 0 {
                return Err("it copies between the host and the device".into());
            }
            let refused = |error| format!("the driver refused the graph: {error}");
            self.exec =
                result::graph::instantiate(self.graph, sys::CUgraphInstantiate_flags(0)).map_err(refused)?;
            result::graph::upload(self.exec, self.stream.cu_stream()).map_err(refused)?;
        }
        Ok(self)
    }

    /// Enqueues the whole graph once.
    pub fn replay(&self) -> Result<()> {
        // SAFETY: `instantiate` succeeded, and the owner keeps the memory of the graph's tensors alive.
        unsafe { result::graph::launch(self.exec, self.stream.cu_stream()) }.w()
    }
}

impl Drop for Graph {
    /// Waits for replays in flight. An error belongs to the stream, and its next use reports it.
    fn drop(&mut self) {
        if !self.exec.is_null() {
            let _ = self.stream.synchronize();
        }
        // SAFETY: `self` owns both handles, and no replay is in flight.
        unsafe {
            if !self.exec.is_null() {
                let _ = result::graph::exec_destroy(self.exec);
            }
            if !self.graph.is_null() {
                let _ = result::graph::destroy(self.graph);
            }
        }
    }
}

unsafe extern "C" {
    fn graph_to_kernels_only(graph: sys::CUgraph) -> usize;
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::{copy, copy_rows, from_host, to_host};
    use super::*;
    use crate::kernels::update::gpu::sum_of_squares;
    use crate::layers::gradcheck;
    use crate::memory::gpu::GpuDevice;

    /// A GPU with a heap and with a stream that no other test uses.
    fn gpu() -> Option<(GpuDevice, CudaDevice)> {
        let Device::Cuda(_) = gradcheck::test_device() else {
            eprintln!("skipped: no GPU requested");
            return None;
        };
        let gpu = GpuDevice::open(0, |_| 64 << 20).unwrap();
        let Device::Cuda(device) = gpu.device.clone() else { return None };
        Some((gpu, device))
    }

    fn numbers(device: &CudaDevice) -> Result<Tensor> {
        Tensor::new(&[1f32, 2.0, 3.0], &Device::Cuda(device.clone()))
    }

    /// Nothing runs during capture, and a replay reads what its tensors hold at that time.
    #[test]
    fn what_is_captured_runs_when_it_is_replayed() {
        let Some((_gpu, device)) = gpu() else { return };
        let x = numbers(&device).unwrap();
        // The copy stays alive; otherwise the heap would reuse its memory.
        let sum = || -> Result<_> {
            let copied = copy(&device, &x)?;
            Ok((sum_of_squares(&device, &copied)?, copied))
        };
        sum().unwrap();
        let (graph, (made, _copied)) = Graph::capture(&device, sum).unwrap().expect("copies and sums");
        assert!(graph.launches >= 2, "{} launches", graph.launches);
        for values in [[1f32, 2.0, 3.0], [4.0, 5.0, 6.0], [0.5, 0.0, 0.0]] {
            from_host(&x, &values).unwrap();
            graph.replay().unwrap();
            let wanted: f64 = values.iter().map(|v| (*v as f64).powi(2)).sum();
            assert_eq!(to_host::<f64>(&made).unwrap()[0], wanted);
        }
    }

    #[test]
    fn rows_are_copied_within_a_graph() {
        let Some((_gpu, device)) = gpu() else { return };
        let x = Tensor::arange(0f32, 24.0, &Device::Cuda(device.clone())).unwrap().reshape((4, 6)).unwrap();
        let y = Tensor::zeros((4, 3), candle_core::DType::F32, x.device()).unwrap();
        let (graph, ()) = Graph::capture(&device, || copy_rows(&device, &x, 6, &y, 3, 3)).unwrap().unwrap();
        graph.replay().unwrap();
        let wanted: Vec<f32> = (0..12).map(|i| (i / 3 * 6 + i % 3) as f32).collect();
        assert_eq!(to_host::<f32>(&y).unwrap(), wanted);
    }

    #[test]
    fn what_would_be_different_is_not_captured() {
        let Some((_gpu, device)) = gpu() else { return };
        let x = numbers(&device).unwrap();
        let none = |launch: &dyn Fn() -> Result<Tensor>| Graph::capture(&device, launch).unwrap().err();
        let sum = || sum_of_squares(&device, &x);
        sum().unwrap();
        assert_eq!(none(&sum), None);
        assert_eq!(none(&|| sum().inspect(|_| not_capturable("luck"))).as_deref(), Some("luck"));
        assert!(none(&|| numbers(&device)).is_some(), "values of the host's");
        assert_eq!(none(&|| x.affine(2.0, 0.0)), None, "candle's own operations");
        assert!(none(&|| to_host::<f32>(&x).and(sum())).is_some(), "the host waits");
        assert!(none(&|| candle_core::bail!("it fails")).unwrap().contains("it fails"));
        // The failed captures do not affect later work.
        assert_eq!(to_host::<f64>(&sum().unwrap()).unwrap()[0], 14.0);
        assert_eq!(none(&sum), None);
    }
}
