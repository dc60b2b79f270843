//! A teacher: a trained network whose logits the loss of another one reads, computed in a type of its own, in every
//! step or once before the first.

use candle_core::{DType, Tensor};

use super::{DeviceBatch, Executor, FeatureMatch, Network, ReservedTensor, StepResult};
use crate::base::{MicroBatchSpec, Phase, Role};
use crate::kernels::host;
use crate::kernels::reference::ReferenceScope;
use crate::layers::{Mode, PassContext};
use crate::memory::Ledger;
use crate::params::Int8Layout;

/// The names that its reservations carry.
const INPUTS: &str = "teacher's inputs";
const LOGITS: &str = "teacher's logits";
const FEATURES: &str = "teacher's features";

pub struct TeacherNetwork {
    pub network: Network,
    /// The type of its activations, and of its weights unless those are 8-bit integers.
    pub dtype: DType,
    /// The layout of its weights if they are 8-bit integers.
    pub int8: Option<Int8Layout>,
    /// Floats of a sample, which arrive in the student's type. 0 for tokens and rows of tables: those have one type.
    pub float_inputs: usize,
    /// It computes in every step. If not, its logits were stored before the first one.
    pub every_step: bool,
}

/// What the student is compared with, in the student's dtype.
#[derive(Default)]
pub(super) struct TeacherOutput {
    pub logits: ReservedTensor,
    /// Those of each [`FeatureMatch`].
    pub features: Vec<ReservedTensor>,
}

impl TeacherNetwork {
    /// Its executor, in the teacher's dtype; `pass` has the teacher's weights.
    pub fn executor<'a>(
        &'a self,
        pass: Option<PassContext<'a>>,
        spec: MicroBatchSpec,
        ledger: &'a Ledger,
    ) -> Executor<'a> {
        let spec = MicroBatchSpec { dtype: self.dtype, ..spec };
        Executor { int8: self.int8.as_ref(), ..Executor::new(pass, spec, ledger) }
    }

    /// Its logits, in f32 on the host. `exec` is its [`executor`](Self::executor), and float inputs have its dtype.
    /// Empty in a dry run.
    pub fn logits_on_host(&self, exec: &Executor, inputs: Option<&Tensor>) -> StepResult<Vec<f32>> {
        let _kernels = ReferenceScope::enter(exec.spec.backend.is_reference());
        exec.ledger.set_phase(Phase::Teacher);
        let x = self.network.run_blocks(exec, inputs)?;
        let logits = self.network.output_of(exec, &x)?;
        drop(x);
        let outputs = self.network.loss.outputs_per_sample();
        let _logits = exec.reserve(Role::Activations, LOGITS, exec.spec.bytes(outputs))?;
        // Two f32 copies: one on the device and one on the host.
        let copies = 2 * exec.spec.batch * outputs * size_of::<f32>();
        let _copies = exec.reserve(Role::Workspace, LOGITS, copies as u64)?;
        let values = logits.map(|logits| host::to_vec(&logits.to_dtype(DType::F32)?));
        Ok(values.transpose()?.unwrap_or_default())
    }

    /// Its logits and features in evaluation mode, in the student's dtype. Frees everything else of the pass.
    pub(super) fn run(
        &self,
        student: &Executor,
        batch: Option<&DeviceBatch>,
        matches: &[FeatureMatch],
    ) -> StepResult<TeacherOutput> {
        let pass = student.pass.as_ref().and_then(|pass| {
            Some(PassContext { store: pass.teacher?, mode: Mode::Eval, teacher: None, ..*pass })
        });
        let exec = self.executor(pass, student.spec, student.ledger);
        let spec = exec.spec;
        let converts = self.dtype != student.spec.dtype;
        let inputs = batch.map(|batch| &batch.inputs);
        let (inputs, reserved) = match converts && self.float_inputs > 0 {
            true => {
                let reserved = exec.reserve(Role::Batch, INPUTS, spec.bytes(self.float_inputs))?;
                (inputs.map(|inputs| inputs.to_dtype(self.dtype)).transpose()?, reserved)
            }
            false => (inputs.cloned(), None),
        };
        let mut x = ReservedTensor { value: inputs.clone(), ..ReservedTensor::default() };
        let mut features = vec![ReservedTensor::default(); matches.len()];
        for (index, block) in self.network.blocks.iter().enumerate() {
            x = exec.forward(&block.nodes, x, false, Mode::Eval, None)?.0;
            for (matched, kept) in matches.iter().zip(&mut features).filter(|(one, _)| one.teacher == index) {
                *kept = x.clone();
                if converts {
                    let bytes = student.spec.bytes(matched.rows * matched.outputs);
                    kept.reservation = exec.reserve(Role::Activations, FEATURES, bytes)?;
                    kept.value = x.value.as_ref().map(|x| x.to_dtype(student.spec.dtype)).transpose()?;
                }
            }
        }
        drop((inputs, reserved));
        let value = self.network.output_of(&exec, &x)?;
        drop(x);
        let outputs = self.network.loss.outputs_per_sample();
        let _unconverted =
            exec.reserve(Role::Workspace, LOGITS, if converts { spec.bytes(outputs) } else { 0 })?;
        let reservation = exec.reserve(Role::Activations, LOGITS, student.spec.bytes(outputs))?;
        let value = value.map(|value| value.to_dtype(student.spec.dtype)).transpose()?;
        let logits = ReservedTensor { value, reservation, requires_grad: false };
        Ok(TeacherOutput { logits, features })
    }
}
