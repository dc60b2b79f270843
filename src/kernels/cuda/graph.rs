//! CUDA graphs: launches that are captured once and replayed by one call of the host.
//!
//! Kernels are captured with the addresses they read and write. Whoever replays them sees to it that these are nobody
//! else's meanwhile; allocation itself is arithmetic on the host (`memory::heap`), and never part of a graph.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

thread_local! {
    /// Why what is being captured on this thread cannot be replayed; absent where nothing is captured.
    static CAPTURE: RefCell<Option<Option<&'static str>>> = const { RefCell::new(None) };
}

/// To be called where what is launched depends on more than the values of tensors, with the reason: a replay would not
/// do what the next pass has to.
pub fn not_capturable(reason: &'static str) {
    CAPTURE.with_borrow_mut(|capture| capture.iter_mut().for_each(|found| *found = Some(reason)));
}

/// Launches in their order.
pub struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    stream: Arc<CudaStream>,
    /// How many there are.
    pub launches: usize,
}

impl Graph {
    /// Captures what `launch` launches, none of which runs, and gives what it gives; or the reason why that fails or could
    /// not be replayed: launched without a capture it works, or is an error.
    pub fn capture<R, E: std::fmt::Display>(
        device: &CudaDevice,
        launch: impl FnOnce() -> std::result::Result<R, E>,
    ) -> Result<std::result::Result<(Self, R), String>> {
        let stream = device.cuda_stream();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).w()?;
        CAPTURE.set(Some(None));
        let outcome = launch();
        let reason = CAPTURE.take().flatten();
        // SAFETY: it was begun on this stream.
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
        // What cannot be captured is nobody else's error.
        drop(outcome);
        let _ = stream.context().check_err();
        Ok(Err(failed))
    }

    fn new(graph: sys::CUgraph, stream: &Arc<CudaStream>) -> Self {
        Self { graph, exec: std::ptr::null_mut(), stream: stream.clone(), launches: 0 }
    }

    /// Makes all ready to be replayed, where it can be.
    fn instantiate(mut self) -> std::result::Result<Self, String> {
        if self.graph.is_null() {
            return Err("nothing was captured".into());
        }
        // SAFETY: the graph is this one's own, and nothing that it launches is under way.
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

    /// Launches all of them once more.
    pub fn replay(&self) -> Result<()> {
        // SAFETY: it was made ready, and whoever has it keeps the memory of its tensors for it.
        unsafe { result::graph::launch(self.exec, self.stream.cu_stream()) }.w()
    }
}

impl Drop for Graph {
    /// What is under way ends first. A failure is the stream's, reported by its next use.
    fn drop(&mut self) {
        if !self.exec.is_null() {
            let _ = self.stream.synchronize();
        }
        // SAFETY: both are this one's own, and nothing of them is under way.
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

    /// A GPU with a heap, and a stream that no other test uses.
    fn gpu() -> Option<(GpuDevice, CudaDevice)> {
        let Device::Cuda(_) = gradcheck::test_device() else {
            eprintln!("skipped: no GPU is asked for");
            return None;
        };
        let gpu = GpuDevice::open(0, |_| 64 << 20).unwrap();
        let Device::Cuda(device) = gpu.device.clone() else { return None };
        Some((gpu, device))
    }

    fn numbers(device: &CudaDevice) -> Result<Tensor> {
        Tensor::new(&[1f32, 2.0, 3.0], &Device::Cuda(device.clone()))
    }

    /// A replay reads what tensors hold by then, and nothing runs while it is captured.
    #[test]
    fn what_is_captured_runs_when_it_is_replayed() {
        let Some((_gpu, device)) = gpu() else { return };
        let x = numbers(&device).unwrap();
        // The copy is kept, or its memory would be given to others.
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
        // None of which is in the way of what comes after.
        assert_eq!(to_host::<f64>(&sum().unwrap()).unwrap()[0], 14.0);
        assert_eq!(none(&sum), None);
    }
}
