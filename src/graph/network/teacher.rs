//! A teacher: a trained network whose logits the loss of another one reads, computed in a type of its own, in every step
//! or once before the first.

use candle_core::{DType, Tensor};

use super::{DeviceBatch, Executor, Network, ReservedTensor, StepResult};
use crate::base::{MicroBatchSpec, Phase, Role};
use crate::kernels::host;
use crate::kernels::reference::ReferenceScope;
use crate::layers::{Mode, PassContext};

/// The names that its reservations carry.
const INPUTS: &str = "teacher's inputs";
const LOGITS: &str = "teacher's logits";

pub struct TeacherNetwork {
    pub network: Network,
    /// The type of its weights and activations.
    pub dtype: DType,
    /// Floats of a sample, which arrive in the student's type. 0 for tokens and rows of tables: those have one type.
    pub float_inputs: usize,
    /// It computes in every step. If not, its logits were stored before the first one.
    pub every_step: bool,
}

impl TeacherNetwork {
    /// Its logits, in f32 on the host, by a pass of its own: `exec` has its weights and its type, and so have floats
    /// among the inputs. Empty in a dry run.
    pub fn logits_on_host(&self, exec: &Executor, inputs: Option<&Tensor>) -> StepResult<Vec<f32>> {
        let _kernels = ReferenceScope::enter(exec.spec.backend.is_reference());
        exec.ledger.set_phase(Phase::Teacher);
        let x = self.network.run_blocks(exec, inputs)?;
        let logits = self.network.output_of(exec, &x)?;
        drop(x);
        let outputs = self.network.loss.outputs_per_sample();
        let _logits = exec.reserve(Role::Activations, LOGITS, exec.spec.bytes(outputs))?;
        // As f32 where they are computed, and on the host.
        let copies = 2 * exec.spec.batch * outputs * size_of::<f32>();
        let _copies = exec.reserve(Role::Workspace, LOGITS, copies as u64)?;
        let values = logits.map(|logits| host::to_vec(&logits.to_dtype(DType::F32)?));
        Ok(values.transpose()?.unwrap_or_default())
    }

    /// Its logits in evaluation mode, in the type of the student; nothing else of its pass stays.
    pub(super) fn logits(
        &self,
        student: &Executor,
        batch: Option<&DeviceBatch>,
    ) -> StepResult<ReservedTensor> {
        let pass = student.pass.as_ref().and_then(|pass| {
            Some(PassContext { store: pass.teacher?, mode: Mode::Eval, teacher: None, ..*pass })
        });
        let spec = MicroBatchSpec { dtype: self.dtype, ..student.spec };
        let exec = Executor { pass, spec, ledger: student.ledger, recompute_blocks: 0, offload: None };
        let converts = self.dtype != student.spec.dtype;
        let inputs = batch.map(|batch| &batch.inputs);
        let x = match converts && self.float_inputs > 0 {
            true => {
                let _inputs = exec.reserve(Role::Batch, INPUTS, spec.bytes(self.float_inputs))?;
                let inputs = inputs.map(|inputs| inputs.to_dtype(self.dtype)).transpose()?;
                self.network.run_blocks(&exec, inputs.as_ref())?
            }
            false => self.network.run_blocks(&exec, inputs)?,
        };
        let value = self.network.output_of(&exec, &x)?;
        drop(x);
        let outputs = self.network.loss.outputs_per_sample();
        let _unconverted =
            exec.reserve(Role::Workspace, LOGITS, if converts { spec.bytes(outputs) } else { 0 })?;
        let reservation = exec.reserve(Role::Activations, LOGITS, student.spec.bytes(outputs))?;
        let value = value.map(|value| value.to_dtype(student.spec.dtype)).transpose()?;
        Ok(ReservedTensor { value, reservation, requires_grad: false })
    }
}
